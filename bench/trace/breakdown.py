"""Where each millisecond of a round went, from a trace: the target's own time between two outcomes, and what it hid.

Knows bars (`timeline`); nothing of how they came about.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.trace.timeline import Bar
from outrider.protocol.errors import InvalidRequest

# What the target waited for before a verify, by where its chain came from.
PARTS = {"hit": "turnaround", "late": "waiting", "drafter": "waiting"}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Milliseconds a round, means over `rounds` of them; the first four make up the whole.

    `verify`: the forward. Between two of them: `turnaround` of hits, `waiting` for a drafter, `fallback` on an AR step
    or a copied chain after a miss. Hidden behind the verify: `commit`, until the drafter begins, and its `work_ahead`.
    """

    rounds: int
    verify: float
    turnaround: float
    waiting: float
    fallback: float
    commit: float
    work_ahead: float

    @property
    def total(self) -> float:
        return self.verify + self.turnaround + self.waiting + self.fallback


def breakdown(bars: Sequence[Bar], first_round: int) -> Breakdown:
    """Of all rounds from `first_round` on.

    Raises:
        InvalidRequest: the trace has no two such rounds.
    """
    verifies = [bar for bar in bars if bar.track == "target" and bar.round >= first_round]
    if len(verifies) < 2:
        raise InvalidRequest(f"the trace has fewer than two rounds from {first_round} on; generate more tokens")
    sources = {bar.round: bar.name for bar in bars if bar.track == "orchestrator"}
    drafting: dict[int, list[Bar]] = {}
    for bar in bars:
        if bar.track not in ("target", "orchestrator"):
            drafting.setdefault(bar.round, []).append(bar)
    gaps = {"turnaround": 0.0, "waiting": 0.0, "fallback": 0.0}
    commits, rounds = [], len(verifies) - 1
    for before, after in pairwise(verifies):
        ended = before.start + before.length
        gaps[PARTS.get(sources.get(after.round, "none"), "fallback")] += after.start - ended
        commits += [min(bar.start for bar in drafting[after.round]) - ended] if after.round in drafting else []
    counted = [after.round for after in verifies[1:]]
    return Breakdown(
        rounds,
        statistics.fmean(bar.length for bar in verifies[1:]),
        gaps["turnaround"] / rounds,
        gaps["waiting"] / rounds,
        gaps["fallback"] / rounds,
        statistics.fmean(commits) if commits else 0.0,
        sum(bar.length for number in counted for bar in drafting.get(number, [])) / rounds,
    )


def table(found: Breakdown) -> str:
    rows = [
        ("verify", found.verify, "the target's forward"),
        ("turnaround", found.turnaround, "hits: from one verify to the next"),
        ("wait for drafter", found.waiting, "for a branch on its way or a just-in-time chain"),
        ("fallback", found.fallback, "misses: to an AR step or a copied chain"),
        ("a round", found.total, ""),
        ("commit", found.commit, "hidden: until the drafter begins"),
        ("work ahead", found.work_ahead, "hidden: the drafter at work"),
    ]
    head = f"where the time of {found.rounds} rounds of SSD went, mean milliseconds a round"
    return "\n".join([head, *(f"  {name:20}{value:>7.2f}      {note}".rstrip() for name, value, note in rows)])
