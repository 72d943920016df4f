"""What a contest showed: a table for people, a record for machines, a picture.

Knows runs and numbers; nothing of how they came about.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.study.contest import Run
from orchestrator.study.statistics import Interval, median_rate, ratio, repeated_share
from protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over one class of prompts. Shares and counts are None where the contestant does not tell them."""

    name: str
    median: float
    against: Interval
    acceptance: float | None
    tokens_per_round: float | None
    hit_rate: float | None
    acceptance_by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One class of prompts at one temperature; ratios are against `baseline`. `repeated`: share of repeated 4-grams."""

    kind: str
    temp: float
    prompts: int
    baseline: str
    repeated: float
    rows: tuple[Row, ...]


def section(kind: str, temp: float, runs: dict[str, list[Run]], baseline: str) -> Section:
    """Sums up; the fastest contestant first."""
    rows = [_row(name, found, runs[baseline]) for name, found in runs.items()]
    repeated = statistics.fmean(repeated_share(run.tokens) for run in runs[baseline])
    ordered = tuple(sorted(rows, key=lambda row: -row.against.value))
    return Section(kind, temp, len(runs[baseline]), baseline, repeated, ordered)


def table(found: Section) -> str:
    """A Markdown table under a line that says what it is of."""
    head = f"{found.kind}, T = {found.temp:g}: {found.prompts} prompts, {found.repeated:.0%} of 4-grams repeated"
    lines = [
        head,
        "",
        f"| | tok/s (median) | against {found.baseline} [95 %] | accepted | tokens a round | hits |",
        "|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        cells = [row.name, f"{row.median:.1f}", str(row.against)]
        cells += [_percent(row.acceptance), _number(row.tokens_per_round), _percent(row.hit_rate)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record(sections: Sequence[Section], machine: dict[str, Any], runs: dict[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {"machine": machine, "sections": [asdict(found) for found in sections], "runs": runs}


def draw(sections: Sequence[Section], path: Path, title: str) -> None:
    """Bars of the ratio to the baseline with their intervals, one panel a section.

    Raises:
        InvalidRequest: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(sections), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sections), squeeze=False, sharey=True)[0]
    for axes, found in zip(panels, sections, strict=True):
        rows = found.rows[::-1]
        values = [row.against.value for row in rows]
        errors = [
            [row.against.value - row.against.low for row in rows],
            [row.against.high - row.against.value for row in rows],
        ]
        colours = ["#2a9d4e" if row.name.startswith(("ssd", "auto")) else "#5c9fd4" for row in rows]
        axes.bar([row.name for row in rows], values, yerr=errors, color=colours, capsize=3)
        axes.axhline(1.0, color="#555555", linewidth=0.8)
        axes.set_title(f"{found.kind}, T = {found.temp:g}", fontsize=10)
        axes.tick_params(axis="x", rotation=60, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"times {sections[0].baseline}")
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidRequest(f"the picture can't be written to {path}: {error.strerror}") from error


def _row(name: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Row:
    timings = [run.timings for run in runs if run.timings is not None]
    drafted, accepted = sum(t.draft_n for t in timings), sum(t.draft_n_accepted for t in timings)
    looked_up = sum(t.cache_hits + t.cache_misses for t in timings)
    rounds = sum(t.rounds for t in timings)
    return Row(
        name,
        median_rate([run.timed for run in runs]),
        ratio([run.timed for run in runs], [run.timed for run in baseline]),
        accepted / drafted if drafted else None,
        sum(t.predicted_n for t in timings) / rounds if drafted else None,
        sum(t.cache_hits for t in timings) / looked_up if looked_up else None,
        _by_position(timings),
    )


def _by_position(timings: Sequence[Any]) -> tuple[float, ...]:
    """How often each chain position was accepted, of the rounds that had it."""
    longest = max((len(t.drafted_by_position) for t in timings), default=0)

    def total(name: str, position: int) -> int:
        return sum(getattr(t, name)[position] for t in timings if position < len(getattr(t, name)))

    return tuple(total("accepted_by_position", i) / total("drafted_by_position", i) for i in range(longest))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
