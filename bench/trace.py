"""Reads a trace of `--trace`, draws its rounds on one clock, and computes how their time divides.

`Breakdown` divides a round into the target's verify, the wait before it, and the drafting hidden behind it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench import picture
from outrider.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = {
    "hit": "#2a9d4e",
    "late": "#8fcf9f",
    "miss": "#d1495b",
    "ngram": "#8d6cc9",
    "drafter": "#e09f3e",
    "head": "#3aa6a0",
    "none": "#9aa5b1",
}
DEPTH_COLOURS = ("#0b4f8a", "#2f77b5", "#5c9fd4", "#8fc1e8", "#bcdcf5")
CHAIN_COLOUR = "#e09f3e"
LEGEND = {
    "hit": "verify of a cached branch",
    "late": "verify of a branch that came late",
    "miss": "verify after a miss (AR step or n-gram chain)",
    "ngram": "verify of an n-gram chain",
    "drafter": "verify of a chain on request",
    "head": "verify of a head's chain",
    "none": "AR step",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Work on a track, in milliseconds since the first event of the trace; `round` is the round's number."""

    track: str
    name: str
    start: float
    length: float
    round: int
    args: dict[str, Any]


def read(path: Path) -> list[Bar]:
    """Returns the work in a trace file by start time.

    Raises:
        InvalidRequest: the file is not a trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        work = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
        origin = float(work[0]["ts"]) if work else 0.0
        return [
            Bar(
                tracks[event["tid"]],
                event["name"],
                (event["ts"] - origin) / 1000,
                event["dur"] / 1000,
                event["args"].get("round", 0),
                event["args"],
            )
            for event in work
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a trace of Outrider: {error}") from error


def draw(bars: Sequence[Bar], title: str, first_round: int, rounds: int) -> Figure:
    """Draws `rounds` rounds from `first_round`.

    Raises:
        InvalidRequest: the trace has no such rounds.
    """
    chosen = [bar for bar in bars if first_round <= bar.round < first_round + rounds]
    verifies = [bar for bar in chosen if bar.track == "target"]
    if not verifies:
        last = first_round + rounds - 1
        raise InvalidRequest(f"the trace has no rounds {first_round} to {last}; generate more tokens")
    sources = {bar.round: bar.name for bar in bars if bar.track == "orchestrator"}
    tracks = ["target", *sorted({bar.track for bar in chosen} - {"target", "orchestrator"})]
    figure = picture.figure(15, 1.6 + 1.1 * len(tracks))
    axes = figure.subplots()
    origin = min(bar.start for bar in verifies)
    _draw_bars(axes, chosen, tracks, sources, origin)
    end = max(bar.start + bar.length for bar in verifies) - origin
    busy = sum(bar.length for bar in verifies) / end
    axes.set_title(f"{title}   (target busy {busy:.0%} of {end:.0f} ms)", loc="left", fontsize=11)
    axes.set_xlim(-0.01 * end, end * 1.01)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, one clock for all processes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _draw_legend(axes, {_source(bar, sources) for bar in verifies}, chosen)
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar], tracks: Sequence[str], sources: dict[int, str], origin: float) -> None:
    for bar in bars:
        if bar.track not in tracks:
            continue
        row = tracks.index(bar.track)
        if bar.track == "target":
            colour, label = COLOURS[_source(bar, sources)], f"{bar.args['accepted'] + 1}"
        else:
            colour = CHAIN_COLOUR if bar.name == "chain" else _shade(bar)
            label = bar.name.removeprefix("depth ")
        axes.broken_barh([(bar.start - origin, bar.length)], (row - 0.36, 0.72), color=colour, edgecolor="white")
        axes.text(bar.start - origin + bar.length / 2, row, label, ha="center", va="center", color="white", fontsize=8)


def _source(bar: Bar, sources: dict[int, str]) -> str:
    """Returns the source of a verify's chain, a key of `COLOURS`."""
    source = sources.get(bar.round, "none")
    return source if source in COLOURS else "none"


def _shade(bar: Bar) -> str:
    depth = int(bar.name.removeprefix("depth "))
    return DEPTH_COLOURS[min(max(depth - 1, 0), len(DEPTH_COLOURS) - 1)]


def _draw_legend(axes: Axes, sources: set[str], bars: Sequence[Bar]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: list[tuple[tuple[str, ...], str]] = [
        ((COLOURS[source],), LEGEND[source]) for source in LEGEND if source in sources
    ]
    shades = {_shade(bar) for bar in bars if bar.name.startswith("depth")}
    if shades:
        used = tuple(shade for shade in DEPTH_COLOURS if shade in shades)
        entries.append((used, "all branches one token deeper (number: their depth)"))
    if any(bar.name == "chain" for bar in bars):
        entries.append(((CHAIN_COLOUR,), "chain on request"))
    entries.append((("none",), "number on the target: tokens committed"))
    axes.legend(
        handles=[tuple(Patch(color=colour) for colour in colours) for colours, _ in entries],
        labels=[words for _, words in entries], handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip


# The part of a round that the wait before a verify counts as, by the source of its chain; others: fallback.
PARTS = {"hit": "turnaround", "late": "waiting", "drafter": "waiting"}


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


def breakdown(bars: Sequence[Bar], first_round: int) -> Breakdown:
    """Returns the breakdown of all rounds from `first_round` on.

    Raises:
        InvalidRequest: the trace has fewer than two such rounds.
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
        ("wait for drafter", found.waiting, "for a branch that is on its way, or a chain on request"),
        ("fallback", found.fallback, "misses: until an AR step or an n-gram chain"),
        ("round", found.total, "sum of the above"),
        ("commit", found.commit, "hidden: until the drafter begins"),
        ("work ahead", found.work_ahead, "hidden: the drafter works"),
    ]
    head = f"time of {found.rounds} rounds of SSD, mean milliseconds per round"
    return "\n".join([head, *(f"  {name:20}{value:>7.2f}      {note}".rstrip() for name, value, note in rows)])
