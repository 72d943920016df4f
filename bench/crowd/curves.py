"""A picture of requests at once: tokens per second over how many there are, beside it what each client waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench import picture
from outrider.bench.contest.statistics import Interval
from outrider.bench.crowd.report import Served, Width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
