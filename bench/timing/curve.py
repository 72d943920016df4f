"""Milliseconds by a whole number: what was measured, straight lines between and beyond."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.protocol.messages import Span


@dataclass(frozen=True, slots=True)
class Curve:
    """By rows, tokens or branches; `points` in rising order, at least one. A single point is a constant."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, at: int) -> float:
        known = dict(self.points)
        if at in known or len(known) == 1:
            return known.get(at, self.points[0][1])
        below = [point for point in self.points if point[0] < at][-2:]
        above = [point for point in self.points if point[0] > at][:2]
        (x0, y0), (x1, y1) = (below[-1], above[0]) if below and above else (above or below)[:2]
        return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), 0.0)


def medians(samples: Mapping[int, Sequence[float]]) -> Curve:
    return Curve(tuple((at, statistics.median(found)) for at, found in sorted(samples.items())))


def milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / 1e6
