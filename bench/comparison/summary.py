"""Summarizes the runs of one runner, and writes the notes under the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.messages import Timings
from outrider.protocol.stats import each

GIGA = 1e9
# The fewest outcomes from which a share is computed.
FEWEST = 5


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over runs. `tokens`, `rounds` and times are of decoding, without the prompt's round.

    `drafted[i]` counts chains with a token i, `accepted[i]` those with tokens 0 to i accepted. `looked_up` and `hits`
    count outcomes by accepted chain tokens. `turnaround_ms` is the median of hits, None without hits.
    """

    tokens: int
    rounds: int
    decode_ms: float
    verify_ms: float
    idle_ms: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    looked_up: tuple[int, ...]
    hits: tuple[int, ...]
    turnaround_ms: float | None

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None without drafted tokens."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds and sum(self.drafted) else None

    @property
    def hit_rate(self) -> float | None:
        return sum(self.hits) / sum(self.looked_up) if sum(self.looked_up) else None


def summary(timings: Sequence[Timings]) -> Summary:
    turnarounds = [ms for t in timings for ms in t.turnaround_ms]
    return Summary(
        tokens=sum(t.predicted_n - 1 for t in timings),
        rounds=sum(max(t.rounds - 1, 0) for t in timings),
        decode_ms=sum(t.predicted_ms for t in timings),
        verify_ms=sum(t.verify_ms for t in timings),
        idle_ms=sum(t.idle_ms for t in timings),
        drafted=each(*(t.drafted_by_position for t in timings)),
        accepted=each(*(t.accepted_by_position for t in timings)),
        looked_up=each(*(t.looked_up_by_accepted for t in timings)),
        hits=each(*(t.hits_by_accepted for t in timings)),
        turnaround_ms=statistics.median(turnarounds) if turnarounds else None,
    )


def notes(name: str, found: Summary, weight_bytes: int) -> list[str]:
    """Returns how a runner's round divides, and its shares by position. `weight_bytes`: what the target reads in one
    forward."""
    whole_ms, verify_ms, idle_ms = (total / found.rounds for total in (found.decode_ms, found.verify_ms, found.idle_ms))
    hits = "" if found.hit_rate is None else f", hit rate {found.hit_rate:.0%}"
    lines = [
        f"- a round of {name}: {whole_ms:.2f} ms = verify {verify_ms:.2f} + target idle {idle_ms:.2f}"
        f" + rest {whole_ms - verify_ms - idle_ms:.2f}; {found.tokens / found.rounds:.2f} tokens{hits};"
        f" the verifies read {1000 * weight_bytes / verify_ms / GIGA:.1f} GB/s of target weights"
    ]
    for what, shares in (
        ("acceptance by position", _shares(found.accepted, found.drafted, 1)),
        ("hit rate by accepted tokens", _shares(found.hits, found.looked_up, 0)),
    ):
        lines += [f"- {what}, {name}: {shares}"] if shares else []
    return lines


def _shares(parts: Sequence[int], wholes: Sequence[int], first: int) -> str:
    pairs = enumerate(zip(parts, wholes, strict=False), first)
    return "  ".join(f"{at}: {part / whole:.2f} of {whole}" for at, (part, whole) in pairs if whole >= FEWEST)
