"""Rounds of one kind over a known text, one process at work and all others still: what each round took.

All loops open a request behind the text's prompt and close it at their end; `numbers` count rounds from 1, of which
the first `WARM_UP`, cold caches included, are not told.

`Curve`: milliseconds by a whole number: what was measured, straight lines between and beyond.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.timing.workbench import Workbench
from outrider.protocol.messages import Span
from outrider.protocol.profile import Latency
from outrider.protocol.sampling import SamplingParams


class Curve(Latency):
    """By rows, tokens or branches."""

    __slots__ = ()
    __call__ = Latency.milliseconds


def medians(samples: Mapping[int, Sequence[float]]) -> Curve:
    return Curve(tuple((at, statistics.median(found)) for at, found in sorted(samples.items())))


def milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / 1e6


WARM_UP = 2

Text = tuple[int, Sequence[int]]
"""The prompt's length, and the prompt with what the target says after it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a round stands in the text: `new` tokens become committed, `chain` is verified behind them."""

    number: int
    base_len: int
    new: Sequence[int]
    chain: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoopTurn:
    """A round of SD, milliseconds: the chain from asking to having, the target's wait beyond it, and all of it from the
    last verify's end to this one's."""

    chain_ms: float
    between_ms: float
    whole_ms: float


def numbers_of(rounds: int) -> range:
    """The numbers of so many rounds that are told."""
    return range(1, WARM_UP + rounds + 1)


def whole(spans: Sequence[Span]) -> Span:
    """From the first start to the last end."""
    return Span(min(span.started_ns for span in spans), max(span.ended_ns for span in spans))


def places_of(known: Text, depth: int, numbers: Iterable[int]) -> Iterator[Place]:
    """K+1 tokens a round; each round's chain is the text itself."""
    told, text = known
    for number in numbers:
        at = known[0] + 1 + (number - 1) * (depth + 1)
        yield Place(number, at, tuple(text[told:at]), tuple(text[at : at + depth]))
        told = at


def steps(spans: Sequence[Span]) -> list[float]:
    """Milliseconds from one plain token to the next."""
    return [(after.ended_ns - before.ended_ns) / 1e6 for before, after in pairwise(spans)]


def verifies(
    bench: Workbench, known: Text, sampling: SamplingParams, rows: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """A verify of so many tokens each, one after the other; where the text ends, from its prompt on again."""
    (start, text), number, at = known, 0, len(known[1])
    for count in rows:
        if at + count > len(text):
            if number:
                bench.close()
            bench.open(text[:start], sampling, target=True, drafter=False)
            number, at = 1, start + 2 + bench.verify(1, start + 1, ()).accepted
        number += 1
        outcome = bench.verify(number, at, text[at : at + count - 1])
        yield count, milliseconds(outcome.work)
        at += outcome.accepted + 1
    bench.close()


def chains(
    bench: Workbench, known: Text, sampling: SamplingParams, depth: int, numbers: Iterable[int]
) -> Iterator[tuple[float, float]]:
    """Just-in-time chains, one right after another: the work, and what the answer took beyond it."""
    start, text = known
    bench.open(text[:start], sampling, target=False, drafter=True)
    for place in places_of(known, 1, numbers):
        drafted, whole_ms = bench.chain(place.number, place.base_len, place.new, depth)
        if place.number > WARM_UP:
            yield milliseconds(drafted.work), whole_ms - milliseconds(drafted.work)
    bench.close()


def turns(
    bench: Workbench, known: Text, sampling: SamplingParams, depth: int, numbers: Iterable[int]
) -> Iterator[LoopTurn]:
    """The chain is drafted, then one as long verified. A drafter that has waited is slower than one that has not."""
    start, text = known
    bench.open(text[:start], sampling, target=True, drafter=True)
    told, at, ended_ns = start, start + 1, 0
    for number in numbers:
        if at + depth >= len(text):
            break
        _, chain_ms = bench.chain(number, at, text[told:at], depth)
        outcome = bench.verify(number, at, text[at : at + depth])
        if number > WARM_UP:
            between_ms = max(outcome.idle_ns / 1e6 - chain_ms, 0.0)
            yield LoopTurn(chain_ms, between_ms, (outcome.work.ended_ns - ended_ns) / 1e6)
        told, at, ended_ns = at, at + outcome.accepted + 1, outcome.work.ended_ns
    bench.close()


def aheads(
    bench: Workbench,
    known: Text,
    sampling: SamplingParams,
    depth: int,
    branches: int,
    numbers: Iterable[int],
    chain: int | None = None,
) -> Iterator[list[Span]]:
    """The work ahead for the outcomes of a chain of K, or of `chain` tokens: the span of each forward."""
    start, text = known
    bench.open(text[:start], sampling, target=False, drafter=True)
    for place in places_of(known, depth if chain is None else chain, numbers):
        _, spans = bench.work_ahead(place.number, place.base_len, place.new, place.chain, depth, branches)
        if place.number > WARM_UP:
            yield spans
    bench.close()
