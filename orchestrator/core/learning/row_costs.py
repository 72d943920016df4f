"""What a forward takes by its rows, learned as forwards come: more rows never take less. Milliseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from outrider.orchestrator.core.learning.averages import SMOOTHING

# Until measured: a row more costs a tenth of the first.
COST_PER_ROW = 0.1
# Up to here every number of rows is measured by itself, beyond with those an eighth more or less.
EXACT_ROWS = 16
PARTS = 8
# What was seen last counts most: the machine is not always as busy. The most that one place counts.
FADE = 0.995
HEAVIEST = 1.0 / SMOOTHING


class RowCosts:
    """Averages by rows, made monotone where they contradict each other; straight lines between them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float, int]] = {}  # by place: milliseconds, weight, when
        self._count = 0
        self._curve: list[tuple[int, float]] | None = None

    def add(self, rows: int, milliseconds: float) -> None:
        place = _place(rows)
        known, weight, when = self._seen.get(place, (milliseconds, 0.0, self._count))
        weight *= FADE ** (self._count - when)
        share = max(1.0 / (weight + 1.0), SMOOTHING)
        self._seen[place] = known + share * (milliseconds - known), min(weight + 1.0, HEAVIEST), self._count
        self._count += 1
        self._curve = None

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(rows, milliseconds), both rising."""
        if self._curve is None:
            weighed = [
                (rows, ms, weight * FADE ** (self._count - when))
                for rows, (ms, weight, when) in sorted(self._seen.items())
            ]
            self._curve = _monotone(weighed)
        return tuple(self._curve)

    def __call__(self, rows: int) -> float | None:
        """None until anything was measured."""
        points = self.points
        if not points:
            return None
        at = bisect_left(points, (rows,))
        if at == len(points):
            return points[-1][1] * usual(rows) / usual(points[-1][0])
        above, ms = points[at]
        if above == rows:
            return ms
        if at == 0:
            return self._below(rows)
        below, less = points[at - 1]
        return less + (ms - less) * (rows - below) / (above - below)

    def _below(self, rows: int) -> float:
        """Fewer rows than were ever seen: straight on from the first two, at least their share of the first."""
        (first, ms), *others = self.points
        if not others:
            return ms * usual(rows) / usual(first)
        second, more = others[0]
        return max(ms - (more - ms) * (first - rows) / (second - first), ms * rows / first)


def _place(rows: int) -> int:
    """Where so many rows are counted: alone while they are few, else with their like."""
    if rows <= EXACT_ROWS:
        return rows
    step = max((1 << rows.bit_length() - 1) // PARTS, 1)
    return round(rows / step) * step


def usual(rows: int) -> float:
    """What so many rows cost, in times of one, where nothing was measured."""
    return 1.0 + COST_PER_ROW * (rows - 1)


def _monotone(weighed: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """The rising curve nearest to what was seen (pool adjacent violators)."""
    pools: list[tuple[float, float, list[int]]] = []
    for rows, ms, weight in weighed:
        pool = (ms, weight, [rows])
        while pools and pools[-1][0] > pool[0]:
            before, heavy, places = pools.pop()
            both = heavy + pool[1]
            pool = ((before * heavy + pool[0] * pool[1]) / both, both, places + pool[2])
        pools.append(pool)
    return [(rows, ms) for ms, _, places in pools for rows in places]
