"""What requests at once showed: a table for people. Intervals are over rounds, and over the
requests in them where a number is of a request; the picture is `curves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.contest.peers import LLAMA_CPP, MLX_LM
from outrider.bench.contest.statistics import Interval, bootstrap, nested_bootstrap, ratio, total_rate
from outrider.bench.crowd.reply import Reply, timed

Rounds = Sequence[Sequence[Reply]]
SPECULATION = ("ar", "sd", "ssd")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds: the middle, and what one in a hundred is above."""

    p50: Interval
    p99: Interval

    def __str__(self) -> str:
        return f"{self.p50.value:.0f} / {self.p99.value:.0f}"


@dataclass(frozen=True, slots=True)
class Served:
    """One way at one width: tokens per second of all requests together, what that is of the peer's, and the time to the
    first token and per token as clients see them."""

    name: str
    rate: Interval
    against_peer: Interval | None
    first_ms: Percentiles
    token_ms: Percentiles


@dataclass(frozen=True, slots=True)
class Width:
    """So many requests at once, held against `peer`: llama.cpp, or mlx-lm where that is the only one.

    `auto_over_best`: auto over the best of ar, sd and ssd, which is `best`, where all of them ran."""

    width: int
    temp: float
    rounds: int
    rows: tuple[Served, ...]
    peer: str
    best: str | None
    auto_over_best: Interval | None

    def row(self, name: str) -> Served:
        return next(row for row in self.rows if row.name == name)


def section(width: int, temp: float, found: Mapping[str, Rounds]) -> Width:
    """Sums up; in the order in which the ways are given."""
    times = {name: [timed(replies) for replies in rounds] for name, rounds in found.items()}
    peer = LLAMA_CPP if LLAMA_CPP in times else MLX_LM
    rows = tuple(
        Served(
            name,
            bootstrap(times[name], total_rate),
            ratio(times[name], times[peer]) if peer in times and name != peer else None,
            _latency([[[reply.first_ms] for reply in replies] for replies in rounds]),
            _latency([[reply.token_ms for reply in replies] for replies in rounds]),
        )
        for name, rounds in found.items()
    )
    modes = [name for name in SPECULATION if name in times]
    best = max(modes, key=lambda name: total_rate(times[name])) if modes and "auto" in times else None
    auto = ratio(times["auto"], times[best]) if best is not None else None
    return Width(width, temp, len(next(iter(times.values()))), rows, peer, best, auto)


def _latency(rounds: Sequence[Sequence[Sequence[float]]]) -> Percentiles:
    """Of milliseconds by round and request."""

    def at(share: int) -> Interval:
        return nested_bootstrap(rounds, lambda many: float(np.percentile(many, share)))

    return Percentiles(at(50), at(99))


def table(found: Width) -> str:
    """A Markdown table under a line that says what it is of."""
    lines = [
        f"{found.width} at once, T = {found.temp:g}, {found.rounds} rounds",
        "",
        f"| | tok/s of all [95 %] | against {found.peer} | first token, ms p50 / p99 | a token, ms p50 / p99 |",
        "|---|---|---|---|---|",
    ]
    for row in found.rows:
        rate = f"{row.rate.value:.0f} [{row.rate.low:.0f}, {row.rate.high:.0f}]"
        token = f"{row.token_ms.p50.value:.1f} / {row.token_ms.p99.value:.1f}"
        against = "" if row.against_peer is None else str(row.against_peer)
        lines.append(f"| {row.name} | {rate} | {against} | {row.first_ms} | {token} |")
    if found.auto_over_best is not None:
        lines += ["", f"- auto over {found.best}, the best of the modes: {found.auto_over_best}"]
    return "\n".join(lines)
