"""The time of a forward by its rows, measured in real rounds or alone."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of a forward by its rows (tokens, branches): measured points in order, linear between and beyond.

    Beyond the first and the last point it never falls below the lesser of the two points that its line goes through.
    """

    points: tuple[tuple[int, float], ...]

    def __call__(self, rows: float) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        right = min(max(bisect_left(self.points, (rows, 0.0)), 1), len(self.points) - 1)
        (low, low_ms), (high, high_ms) = self.points[right - 1], self.points[right]
        return max(low_ms + (high_ms - low_ms) * (rows - low) / (high - low), min(low_ms, high_ms))
