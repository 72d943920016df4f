"""A picture of a contest: bars of each contestant's ratio to the baseline with their intervals, one panel a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench import picture
from outrider.bench.contest.report import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "#2a9d4e"
OTHERS = "#5c9fd4"
COLUMNS = 2
TITLE_WIDTH = 64


def draw(sections: Sequence[Section], path: Path, title: str) -> None:
    """Lying bars, so that the names of many contestants stay readable.

    Raises:
        InvalidRequest: the file can't be written.
    """
    columns = min(COLUMNS, len(sections))
    lines = -(-len(sections) // columns)
    longest = max(len(found.rows) for found in sections)
    figure = picture.figure(6.4 * columns, lines * (1.4 + 0.34 * longest) + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True).flat
    for axes, found in zip(panels, sections, strict=False):
        _panel(axes, found)
    for axes in list(panels)[len(sections) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10)
    picture.save(figure, path, 110)


def _panel(axes: Axes, found: Section) -> None:
    values = [row.against.value for row in found.rows]
    errors = [
        [row.against.value - row.against.low for row in found.rows],
        [row.against.high - row.against.value for row in found.rows],
    ]
    colours = [OURS if row.name.startswith(("ssd", "auto")) else OTHERS for row in found.rows]
    axes.barh(range(len(values)), values, xerr=errors, color=colours, capsize=3, height=0.72)
    for at, row in enumerate(found.rows):
        axes.text(0.02, at, f"{row.against.value:.2f}", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(values)), [row.name for row in found.rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#555555", linewidth=0.8)
    conditions = textwrap.fill(found.conditions, TITLE_WIDTH)
    axes.set_title(f"{found.kind}, T = {found.temp:g}\n{conditions}", fontsize=9, loc="left")
    axes.set_xlabel(f"times {found.baseline}", fontsize=8)
    axes.tick_params(labelbottom=True)
    axes.spines[["top", "right"]].set_visible(False)
