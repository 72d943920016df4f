"""Draws the rounds of a request on one clock, and computes how their time divides.

`Breakdown` divides a round into the target's verify, the wait before it, and the drafting hidden behind it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from outrider.bench import picture
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import DraftWork, RoundRecord, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOURCES = {
    "hit": ("#2a9d4e", "verify of a cached branch"),
    "late": ("#8fcf9f", "verify of a branch that came late"),
    "miss": ("#d1495b", "verify after a miss (AR step or n-gram chain)"),
    "ngram": ("#8d6cc9", "verify of an n-gram chain"),
    "drafter": ("#e09f3e", "verify of a chain on request"),
    "head": ("#3aa6a0", "verify of a head's chain"),
    "none": ("#9aa5b1", "AR step"),
}
"""What a round can verify: its colour, and its words in the legend."""
DEPTH_COLOURS = ("#0b4f8a", "#2f77b5", "#5c9fd4", "#8fc1e8", "#bcdcf5")
CHAIN_COLOUR = "#e09f3e"

# The part of a round to which the wait before a verify is counted, by the chain's source (default: fallback).
WAIT_PARTS = {"hit": "turnaround", "late": "waiting", "drafter": "waiting"}


def chain_source(record: RoundRecord) -> str:
    """Returns what the round verified, a key of `SOURCES`: the lookup's result, or else the chain's source."""
    if record.lookup == "none" or record.source == "drafter":
        return record.source if record.source in SOURCES else "none"
    return "hit" if record.lookup == "grown" else record.lookup


def draw_rounds(records: Sequence[RoundRecord], title: str, first_round: int, rounds: int) -> Figure:
    """Draws `rounds` rounds from `first_round`.

    Raises:
        InvalidRequest: there are no such rounds.
    """
    numbers = range(first_round, first_round + rounds)
    chosen = [record for record in records if record.round in numbers]
    drafting = [work for record in records for work in record.drafting if work.round in numbers]
    if not chosen:
        raise InvalidRequest(f"there are no rounds {numbers[0]} to {numbers[-1]}; generate more tokens")
    tracks = ["target", *sorted({work.drafter for work in drafting})]
    figure = picture.create_figure(15, 1.6 + 1.1 * len(tracks))
    axes = figure.subplots()
    origin_ns = min(record.verify.started_ns for record in chosen)
    for record in chosen:
        colour, _ = SOURCES[chain_source(record)]
        _draw_bar(axes, 0, record.verify, origin_ns, colour, str(record.tokens))
    for work in drafting:
        label = str(work.depth) if work.branches or not work.depth else "chain"
        _draw_bar(axes, tracks.index(work.drafter), work.work, origin_ns, _drafting_colour(work), label)
    end = Span(origin_ns, max(record.verify.ended_ns for record in chosen)).milliseconds
    busy = sum(record.verify.milliseconds for record in chosen) / end
    axes.set_title(f"{title}   (target busy {busy:.0%} of {end:.0f} ms)", loc="left", fontsize=11)
    axes.set_xlim(-0.01 * end, end * 1.01)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, one clock for all processes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_legend(axes, set(map(chain_source, chosen)), set(map(_drafting_colour, drafting)))
    return figure


def _draw_bar(axes: Axes, row: int, span: Span, origin_ns: int, colour: str, label: str) -> None:
    start, length = (span.started_ns - origin_ns) / MILLISECOND_NS, span.milliseconds
    axes.broken_barh([(start, length)], (row - 0.36, 0.72), color=colour, edgecolor="white")
    axes.text(start + length / 2, row, label, ha="center", va="center", color="white", fontsize=8)


def _drafting_colour(work: DraftWork) -> str:
    if work.depth and not work.branches:
        return CHAIN_COLOUR
    return DEPTH_COLOURS[min(max(work.depth - 1, 0), len(DEPTH_COLOURS) - 1)]


def _draw_legend(axes: Axes, sources: set[str], shades: set[str]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[tuple[str, ...], str]] = [
        ((colour,), words) for source, (colour, words) in SOURCES.items() if source in sources
    ]
    if used := tuple(shade for shade in DEPTH_COLOURS if shade in shades):
        entries.append((used, "all branches one token deeper (number: their depth)"))
    if CHAIN_COLOUR in shades:
        entries.append(((CHAIN_COLOUR,), "chain on request"))
    entries.append((("none",), "number on the target: tokens committed"))
    axes.legend(
        handles=[tuple(Patch(color=colour) for colour in colours) for colours, _ in entries],
        labels=[words for _, words in entries], handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Mean milliseconds per round over `rounds` rounds.

    A round is the `verify` and the wait before it: `turnaround` of hits, `waiting` for a drafter, `fallback` after a
    miss. Hidden behind the verify are `commit`, until the drafter begins, and `work_ahead`.
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


def compute_breakdown(records: Sequence[RoundRecord], first_round: int) -> Breakdown:
    """Returns the breakdown of all rounds from `first_round` on.

    Raises:
        InvalidRequest: there are fewer than two such rounds.
    """
    chosen = [record for record in records if record.round >= first_round]
    if len(chosen) < 2:
        raise InvalidRequest(f"there are fewer than two rounds from {first_round} on; generate more tokens")
    drafting = defaultdict[int, list[Span]](list)
    for record in records:
        for work in record.drafting:
            drafting[work.round].append(work.work)
    totals = dict.fromkeys(("verify", "turnaround", "waiting", "fallback", "work_ahead"), 0.0)
    commits, rounds = list[float](), len(chosen) - 1
    for before, after in pairwise(chosen):
        ended_ns, works = before.verify.ended_ns, drafting[after.round]
        totals[WAIT_PARTS.get(chain_source(after), "fallback")] += (after.verify.started_ns - ended_ns) / MILLISECOND_NS
        totals["verify"] += after.verify.milliseconds
        totals["work_ahead"] += sum(work.milliseconds for work in works)
        commits += [(min(work.started_ns for work in works) - ended_ns) / MILLISECOND_NS] if works else []
    means = {part: total / rounds for part, total in totals.items()}
    return Breakdown(rounds, commit=statistics.fmean(commits or [0.0]), **means)


def format_breakdown(found: Breakdown) -> str:
    rows = [
        ("verify", found.verify, "the target's forward"),
        ("turnaround", found.turnaround, "hits: from one verify to the next"),
        ("wait for drafter", found.waiting, "for a branch that is on its way, or a chain on request"),
        ("fallback", found.fallback, "misses: until an AR step or an n-gram chain"),
        ("round", found.total, "sum of the above"),
        ("commit", found.commit, "hidden: until the drafter begins"),
        ("work ahead", found.work_ahead, "hidden: the drafter works"),
    ]
    head = f"time of {found.rounds} rounds of SSD, mean milliseconds per round"
    return "\n".join([head, *(f"  {name:20}{value:>7.2f}      {note}".rstrip() for name, value, note in rows)])
