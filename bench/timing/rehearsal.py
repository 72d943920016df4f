"""One (K, B) tried on known text: rounds as SSD makes them, target and drafter at work side by side.

What an outcome finds in the cache is decided by what the drafter had finished when the verify ended; how fast each
worked beside the other is measured along the way.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.timing.curve import milliseconds
from outrider.bench.timing.loops import Text
from outrider.bench.timing.workbench import Workbench
from outrider.protocol.messages import Branch, Branches
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A round: `rows` were verified, `accepted` chain tokens held; `in_full` would have held with a chain of full
    length. `hit`: the outcome's branch was there by then. `verify_ms` beside the working drafter."""

    rows: int
    accepted: int
    in_full: int
    hit: bool
    verify_ms: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """All rounds of one (K, B)."""

    depth: int
    branches: int
    rounds: tuple[Rehearsed, ...]

    @property
    def tokens(self) -> float:
        """E[tokens] of a round of SSD, bonus included; branches are served as deep as they have come."""
        return 1.0 + statistics.fmean(tried.accepted for tried in self.rounds)

    @property
    def tokens_in_full(self) -> float:
        """E[tokens] of a round of SD, whose chains are always K long."""
        return 1.0 + statistics.fmean(tried.in_full for tried in self.rounds)

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(tried.hit for tried in self.rounds)

    @property
    def rows(self) -> float:
        return statistics.fmean(tried.rows for tried in self.rounds)

    def acceptance(self, position: int) -> float:
        """How often chain token `position` held, given that those before it did."""
        reached = sum(tried.in_full >= position for tried in self.rounds)
        return sum(tried.in_full > position for tried in self.rounds) / reached if reached else 0.0


def rehearse(
    bench: Workbench, texts: Sequence[Text], sampling: SamplingParams, depth: int, branches: int, tokens: int
) -> Rehearsal:
    """Goes over the first `tokens` after each prompt of `texts`; a hit verifies the branch as it was, a miss a
    just-in-time chain."""
    rounds: list[Rehearsed] = []
    for start, text in texts:
        bench.open(text[:start], sampling, target=True, drafter=True)
        rounds += _over(bench, start, text[: start + tokens + depth + 2], depth, branches)
        bench.close()
    return Rehearsal(depth, branches, tuple(rounds))


def _over(bench: Workbench, start: int, text: Sequence[int], depth: int, branches: int) -> Iterator[Rehearsed]:
    told, at, number = start, start + 1, 1
    full = served = bench.chain(number, at, text[told:at], depth)[0].chain
    told = at
    while at + depth + 1 < len(text):
        done = bench.both(number, at, text[told:at], served, depth, branches)
        told, held = at, done.outcome.accepted
        outcome = (*served[:held], done.outcome.bonus)
        in_time = _prepared(done.pieces, outcome, done.outcome.work.ended_ns)
        verify_ms = milliseconds(done.outcome.work)
        yield Rehearsed(1 + len(served), held, agreeing(full, text[at:]), in_time is not None, verify_ms)
        at, number = at + held + 1, number + 1
        if at + depth + 1 >= len(text):
            return
        if in_time is None:
            full = served = bench.chain(number, at, text[told:at], depth)[0].chain
            told = at
        else:
            complete = _prepared(done.pieces, outcome)
            full, served = (complete or in_time).chain, in_time.chain


def agreeing(chain: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of the chain are the text's own."""
    return next((i for i, (own, true) in enumerate(zip(chain, text, strict=False)) if own != true), len(chain))


def _prepared(pieces: Sequence[Branches], committed: tuple[int, ...], until_ns: int | None = None) -> Branch | None:
    """The branch for this outcome in its last form, of those finished `until_ns`."""
    found = None
    for piece in pieces:
        if until_ns is None or piece.work.ended_ns <= until_ns:
            found = next((b for b in piece.entries if b.committed == committed), found)
    return found
