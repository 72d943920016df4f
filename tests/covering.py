"""Which rows of a matrix of settings are run: few, in which any two values of different settings meet at least once.

`OUTRIDER_MATRIX=1` runs all rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest

WHOLE = bool(os.environ.get("OUTRIDER_MATRIX"))
Row = tuple[object, ...]
Met = tuple[tuple[int, int], ...]


def matrix(meeting: int = 2, **settings: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test with these settings, so that any `meeting` values of different ones meet."""
    values = [list(one) for one in settings.values()]
    chosen = product(*values) if WHOLE else rows(values, meeting)
    return pytest.mark.parametrize(tuple(settings), list(chosen))


def rows(values: Sequence[Sequence[object]], meeting: int) -> list[Row]:
    """Row by row the one in which most meet that have not met yet; always the same ones, in the product's order."""
    places = list(product(*(range(len(one)) for one in values)))
    fresh = {row: _met(row, meeting) for row in places}
    unmet = set[Met]().union(*fresh.values())
    chosen = []
    while unmet:
        best = max(places, key=lambda row: len(fresh[row] & unmet))
        unmet -= fresh[best]
        chosen.append(best)
    return [tuple(one[at] for one, at in zip(values, row, strict=True)) for row in sorted(chosen)]


def _met(row: tuple[int, ...], meeting: int) -> set[Met]:
    return set(combinations(enumerate(row), meeting))
