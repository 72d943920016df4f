"""Milliseconds by a whole number: what was measured, straight lines between and beyond."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from outrider.protocol.messages import Span
from outrider.protocol.profile import Latency


class Curve(Latency):
    """By rows, tokens or branches."""

    __slots__ = ()
    __call__ = Latency.milliseconds


def medians(samples: Mapping[int, Sequence[float]]) -> Curve:
    return Curve(tuple((at, statistics.median(found)) for at, found in sorted(samples.items())))


def milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / 1e6
