"""What requests at once showed: a table for people. Intervals are over rounds, and over the
requests in them where a number is of a request; `draw` makes the picture.

`draw`: a picture of requests at once: tokens per second over how many there are, beside it what each client waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench import picture
from outrider.bench.contest.contest import Interval, bootstrap, nested_bootstrap, ratio, total_rate
from outrider.bench.contest.peers import LLAMA_CPP, MLX_LM
from outrider.bench.crowd.ask import Reply, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


COLOURS = {
    "ar": "#5c9fd4",
    "sd": "#e09f3e",
    "ssd": "#2a9d4e",
    "auto": "#12552b",
    "mlx-lm": "#d1495b",
    "llama.cpp": "#8d6cc9",
}
PANELS: dict[str, Callable[[Served], Interval]] = {
    "tokens per second, all together": lambda row: row.rate,
    "first token, ms (p50; dotted p99)": lambda row: row.first_ms.p50,
    "a token, ms (p50; dotted p99)": lambda row: row.token_ms.p50,
}
TAILS: dict[str, Callable[[Served], Interval]] = {
    "first token, ms (p50; dotted p99)": lambda row: row.first_ms.p99,
    "a token, ms (p50; dotted p99)": lambda row: row.token_ms.p99,
}


def draw(sections: Sequence[Width], path: Path, title: str) -> None:
    """A line of panels for each temperature.

    Raises:
        InvalidRequest: the file can't be written.
    """
    temps = list(dict.fromkeys(found.temp for found in sections))
    figure = picture.figure(5.2 * len(PANELS), 3.9 * len(temps) + 0.5)
    grid = figure.subplots(len(temps), len(PANELS), squeeze=False)
    for temp, panels in zip(temps, grid, strict=True):
        chosen = [found for found in sections if found.temp == temp]
        for axes, (name, of) in zip(panels, PANELS.items(), strict=True):
            _panel(axes, chosen, of, TAILS.get(name))
            axes.set_title(f"{name}, T = {temp:g}", fontsize=10, loc="left")
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    picture.save(figure, path, 110)


def _panel(
    axes: Axes, sections: Sequence[Width], of: Callable[[Served], Interval], tail: Callable[[Served], Interval] | None
) -> None:
    from matplotlib.ticker import LogLocator

    widths = [found.width for found in sections]
    for name in [row.name for row in sections[0].rows]:
        values = [of(found.row(name)) for found in sections]
        errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
        colour = COLOURS.get(name)
        axes.errorbar(
            widths,
            [v.value for v in values],
            yerr=errors,
            label=name,
            color=colour,
            marker="o",
            markersize=4,
            capsize=3,
        )
        if tail is not None:
            axes.plot(widths, [tail(found.row(name)).value for found in sections], color=colour, linestyle=":")
    if tail is not None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("requests at once")
    axes.set_ylim(bottom=0 if tail is None else None)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
