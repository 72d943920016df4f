"""A table and a picture of the latencies of requests at random times.

Intervals are over blocks. A request's time per token is the time from its first text to its end divided by its other
tokens, as in vLLM's benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.comparison.runs import Interval, Timed, bootstrap, total_rate
from tools import picture
from tools.web.load_generator import TimedAnswer
from tools.web.streams import StreamTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"ar": "#5c9fd4", "sd": "#e09f3e", "ssd": "#2a9d4e", "auto": "#12552b", "mlx-lm": "#d1495b"}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 99th percentile in milliseconds."""

    p50: Interval
    p99: Interval

    def __format__(self, form: str) -> str:
        form = form or ".0f"
        return f"{self.p50.value:{form}} / {self.p99.value:{form}}"


def estimate_percentiles(blocks: Sequence[Sequence[float]]) -> Percentiles:
    """Estimates both percentiles of the milliseconds of all blocks."""
    arrays = list(map(np.array, blocks))

    def at(share: int) -> Interval:
        return bootstrap(arrays, lambda chosen: float(np.percentile(np.concatenate(chosen), share)))

    return Percentiles(at(50), at(99))


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One server at one load: total tokens per second, milliseconds to the first text and per token, and errors."""

    name: str
    share: float
    rate: Interval
    first_ms: Percentiles
    token_ms: Percentiles
    requests: int
    errors: tuple[str, ...]


def make_row(name: str, share: float, blocks: Sequence[Sequence[TimedAnswer]]) -> LatencyRow:
    """Sums up the blocks of one server."""
    found = [[answer.stream for answer in block if answer.stream is not None] for block in blocks]
    errors = tuple(answer.error for block in blocks for answer in block if answer.stream is None)
    return LatencyRow(
        name,
        share,
        bootstrap([time_streams(block) for block in found], total_rate),
        estimate_percentiles([[1000 * (s.first - s.sent) for s in block] for block in found]),
        estimate_percentiles([[ms for s in block for ms in _token_ms(s)] for block in found]),
        sum(len(block) for block in blocks),
        errors,
    )


def time_streams(block: Sequence[StreamTimes]) -> Timed:
    """Returns all tokens, and the seconds from the first sending to the last end."""
    seconds = max(stream.ended for stream in block) - min(stream.sent for stream in block)
    return Timed(sum(stream.tokens for stream in block), seconds)


def _token_ms(stream: StreamTimes) -> list[float]:
    """Returns the mean time of a token after the first one; empty without one."""
    return [1000 * (stream.ended - stream.first) / (stream.tokens - 1)] if stream.tokens > 1 else []


def table(rows: Sequence[LatencyRow]) -> str:
    """Returns a Markdown table."""
    lines = [
        "| | total tok/s [95 %] | first text, ms p50 / p99 | per token, ms p50 / p99 | errors |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = f"{row.rate:.0f} | {row.first_ms} | {row.token_ms:.1f}"
        lines.append(f"| {row.name} | {numbers} | {len(row.errors)} of {row.requests} |")
    return "\n".join(lines)


PANELS: dict[str, Callable[[LatencyRow], Interval | Percentiles]] = {
    "total tokens per second": lambda row: row.rate,
    "first text, ms (p50; dotted p99)": lambda row: row.first_ms,
    "per token, ms (p50; dotted p99)": lambda row: row.token_ms,
}


def draw(rows: Sequence[LatencyRow], path: Path, title: str) -> None:
    """Draws rates and both times over the load, in a panel each.

    Raises:
        InvalidRequest: the file can't be written.
    """
    figure = picture.create_figure(5.2 * len(PANELS), 4.2)
    for axes, (panel, of) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for name in dict.fromkeys(one.name for one in rows):
            chosen = [one for one in rows if one.name == name]
            _draw_curve(axes, name, [one.share for one in chosen], list(map(of, chosen)))
        axes.set_title(panel, fontsize=10, loc="left")
        axes.set_xlabel("load as a share of the capacity")
        axes.set_xticks(sorted({one.share for one in rows}))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    picture.save(figure, path, 110)


def _draw_curve(axes: Axes, name: str, xs: Sequence[float], numbers: Sequence[Interval | Percentiles]) -> None:
    """Draws a runner's numbers with their intervals; of percentiles the median, and dotted the 99th."""
    from matplotlib.ticker import LogLocator

    values = [number.p50 if isinstance(number, Percentiles) else number for number in numbers]
    errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
    colour, heights = COLOURS.get(name), [v.value for v in values]
    axes.errorbar(xs, heights, yerr=errors, label=name, color=colour, marker="o", markersize=4, capsize=3)
    if tails := [number.p99.value for number in numbers if isinstance(number, Percentiles)]:
        axes.plot(xs, tails, color=colour, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
