"""The chosen rows of a matrix of settings contain every combination of two (or more) values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import rows

VALUES = [["a", "b", "c"], [1, 2, 3], [True, False], ["x", "y", "z"], [None, 0]]


@pytest.mark.parametrize(("strength", "most"), [(2, 12), (3, 40)])
def test_all_combinations_of_values_are_covered_in_few_rows(strength: int, most: int) -> None:
    found = rows(VALUES, strength)
    for settings in combinations(range(len(VALUES)), strength):
        combined = {tuple(row[setting] for setting in settings) for row in found}
        assert combined == set(product(*(VALUES[setting] for setting in settings)))
    assert len(found) == len(set(found)) <= most


def test_two_settings_give_the_full_product() -> None:
    assert rows(VALUES[:2], 2) == list(product(*VALUES[:2]))
