"""Pairwise testing: chooses a few rows of a matrix of settings in which every pair of values occurs.

`OUTRIDER_MATRIX=1` runs all rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest

RUN_ALL = bool(os.environ.get("OUTRIDER_MATRIX"))
Row = tuple[object, ...]
Combination = tuple[tuple[int, int], ...]
"""Some settings of a row by number, each with the number of its value."""


def matrix(strength: int = 2, **settings: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test so that every combination of values of any `strength` settings occurs in some row."""
    values = [list(one) for one in settings.values()]
    chosen = product(*values) if RUN_ALL else rows(values, strength)
    return pytest.mark.parametrize(tuple(settings), list(chosen))


def rows(values: Sequence[Sequence[object]], strength: int) -> list[Row]:
    """Returns the rows, in the order of the full product; always the same for the same values.

    Chosen greedily: the next row is the one with the most combinations that no earlier row has.
    """
    candidates = list(product(*(range(len(one)) for one in values)))
    of_row = {row: _combinations(row, strength) for row in candidates}
    missing = set[Combination]().union(*of_row.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda row: len(of_row[row] & missing))
        missing -= of_row[best]
        chosen.append(best)
    return [tuple(one[at] for one, at in zip(values, row, strict=True)) for row in sorted(chosen)]


def _combinations(row: tuple[int, ...], strength: int) -> set[Combination]:
    return set(combinations(enumerate(row), strength))
