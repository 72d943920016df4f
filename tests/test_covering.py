"""A matrix that is not run whole leaves out no meeting of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import rows

VALUES = [["a", "b", "c"], [1, 2, 3], [True, False], ["x", "y", "z"], [None, 0]]


@pytest.mark.parametrize(("meeting", "most"), [(2, 12), (3, 40)])
def test_all_combinations_of_values_are_covered_in_few_rows(meeting: int, most: int) -> None:
    found = rows(VALUES, meeting)
    for settings in combinations(range(len(VALUES)), meeting):
        met = {tuple(row[setting] for setting in settings) for row in found}
        assert met == set(product(*(VALUES[setting] for setting in settings)))
    assert len(found) == len(set(found)) <= most


def test_two_settings_give_the_full_product() -> None:
    assert rows(VALUES[:2], 2) == list(product(*VALUES[:2]))
