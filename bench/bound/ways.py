"""Who could draft where, in chains, trees and with copies, and what each would bring at most in known texts.

All drafting beside the verify is done when that ends, each outcome is a hit, and no message takes time. Each verify
takes what one of so many rows was measured to take, with a drafter at work beside it where one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from outrider.bench.bound.times import Times
from outrider.bench.contest.statistics import Timed, total_rate
from outrider.bench.tree_rounds import Cost, Found, Learned, Text, Way, in_rounds
from outrider.protocol.heads import DRAFT_MODEL

DEPTHS = (1, 2, 3, 4, 6)
NODES = (1, 2, 3, 4, 6, 8)
FORMS = (Way("chain"), Way("tree", beside=True), Way("tree, copies", beside=True, copies=True))


@dataclass(frozen=True, slots=True)
class Seating:
    """`drafters`, of which `own` draft in the target's process and take its time, the others beside it.

    `foreseeing`: a head beside the target is supposed to have read rows that it can't have yet.
    """

    name: str
    drafters: tuple[str, ...]
    own: tuple[str, ...] = ()
    foreseeing: bool = False

    @property
    def has_worker(self) -> bool:
        return set(self.drafters) != set(self.own)


@dataclass(frozen=True, slots=True)
class Brought:
    """A way's tokens and seconds, text by text, at the best depth and size of its drafts; `rows` on average."""

    timed: tuple[Timed, ...]
    per_verify: float
    rows: float
    depth: int


def seatings(head: str) -> tuple[Seating, ...]:
    return (
        Seating("draft model in the draft worker", (DRAFT_MODEL,)),
        Seating("draft model in the target's process", (DRAFT_MODEL,), (DRAFT_MODEL,)),
        Seating(f"{head} in the draft worker, foreseeing", (head,), foreseeing=True),
        Seating(f"{head} in the target's process", (head,), (head,)),
        Seating(f"draft model in the draft worker, {head} in the target's process", (DRAFT_MODEL, head), (head,)),
        Seating("both in the draft worker, foreseeing", (DRAFT_MODEL, head), foreseeing=True),
    )


def ways_of(seating: Seating, form: Way, cost: Cost) -> list[Way]:
    """In all depths, with all numbers of nodes, and with as many as pay by `cost`."""
    own = seating.own if seating.has_worker else ()
    ways = [replace(form, drafters=seating.drafters, brief=brief) for brief in dict.fromkeys(((), own))]
    sizes = [(most, depth) for most, depth in product(NODES, DEPTHS) if depth <= most]
    fixed = [replace(way, most=most, depth=depth) for way, (most, depth) in product(ways, sizes)]
    return fixed + [replace(way, cost=cost, depth=depth) for way, depth in product(ways, DEPTHS)]


def through(texts: Sequence[Text], ways: Sequence[Way], first: int) -> dict[Way, tuple[Found, ...]]:
    """What each way brought in each text from the `first` on; those before only teach."""
    found: dict[Way, tuple[Found, ...]] = {}
    for way in ways:
        learned, own = Learned(), [Found() for _ in texts]
        for text, sums in zip(texts, own, strict=True):
            in_rounds(text, way, learned, sums)
        found[way] = tuple(own[first:])
    return found


def best(found: Mapping[Way, Sequence[Found]], times: Sequence[Times], beside: int, own: Sequence[str]) -> Brought:
    """Of these ways the quickest, with a drafter that grows so many branches beside each verify."""
    all_brought = [_brought(way, texts, times, beside, own) for way, texts in found.items()]
    return max(all_brought, key=lambda one: total_rate(one.timed))


def _brought(way: Way, texts: Sequence[Found], times: Sequence[Times], beside: int, own: Sequence[str]) -> Brought:
    timed = [Timed(text.tokens, _seconds(way, text, of, beside, own)) for text, of in zip(texts, times, strict=True)]
    rounds = sum(text.rounds for text in texts)
    rows = 1 + sum(text.nodes for text in texts) / rounds
    return Brought(tuple(timed), sum(text.tokens for text in texts) / rounds, rows, way.depth)


def _seconds(way: Way, text: Found, times: Times, beside: int, own: Sequence[str]) -> float:
    drafting_ms = sum(times.drafting_ms[name].milliseconds(way.depth_of(name)) for name in own)
    verify_ms = times.verify_ms[beside].milliseconds
    return sum(count * (verify_ms(rows) + drafting_ms) for rows, count in text.rows.items()) / 1000
