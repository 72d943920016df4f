"""What a process has counted since it started, as it tells others: how often, and how long. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.fields import Name, Serial


@dataclass(frozen=True, slots=True)
class Tally:
    """What `name` stands for happened `count` times."""

    name: Name
    count: Serial


@dataclass(frozen=True, slots=True)
class Durations:
    """`counts[i]` lasted at most `bounds[i]` seconds and longer than the bound before, the last count longer than all;
    `seconds` in all."""

    bounds: tuple[float, ...] = ()
    counts: tuple[Serial, ...] = ()
    seconds: float = 0.0
