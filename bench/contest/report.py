"""What a contest showed: a table for people.

Knows runs and numbers; nothing of how they came about. The picture is `outrider.bench.contest.bars`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.contest.contest import Run
from outrider.bench.contest.statistics import Interval, median_rate, ratio, repeated_share
from outrider.bench.contest.summary import Judged, summary


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over one class of prompts. Shares and counts are None where the contestant does not tell them;
    `judged` where the formula has no word on it."""

    name: str
    median: float
    against: Interval
    acceptance: float | None
    tokens_per_round: float | None
    hit_rate: float | None
    judged: Judged | None


@dataclass(frozen=True, slots=True)
class Section:
    """One class of prompts at one temperature; ratios are against `baseline`. `repeated`: share of repeated 4-grams.

    `conditions` say what ran on which cores; `notes` are the lines under the table.
    """

    kind: str
    temp: float
    conditions: str
    prompts: int
    baseline: str
    repeated: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def section(
    kind: str,
    temp: float,
    conditions: str,
    runs: Mapping[str, list[Run]],
    baseline: str,
    judged: Mapping[str, Judged],
    notes: Sequence[str] = (),
) -> Section:
    """Sums up; the fastest contestant first."""
    rows = [_row(name, found, runs[baseline], judged.get(name)) for name, found in runs.items()]
    repeated = statistics.fmean(repeated_share(run.tokens) for run in runs[baseline])
    ordered = tuple(sorted(rows, key=lambda row: -row.against.value))
    return Section(kind, temp, conditions, len(runs[baseline]), baseline, repeated, ordered, tuple(notes))


def table(found: Section) -> str:
    """A Markdown table under a line that says what it is of, and what explains it."""
    head = f"{found.kind}, T = {found.temp:g}: {found.prompts} prompts, {found.repeated:.0%} of 4-grams repeated"
    has_formula = any(row.judged for row in found.rows)
    titles = ["", "tok/s (median)", f"against {found.baseline} [95 %]", *(["of the formula"] if has_formula else [])]
    titles += ["accepted", "tokens a round", "hits"]
    lines = [f"{head}; {found.conditions}", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in found.rows:
        cells = [row.name, f"{row.median:.1f}", str(row.against)]
        cells += [_number(row.judged.share if row.judged else None)] if has_formula else []
        cells += [_percent(row.acceptance), _number(row.tokens_per_round), _percent(row.hit_rate)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(["", *found.notes] if found.notes else [])])


def _row(name: str, runs: Sequence[Run], baseline: Sequence[Run], judged: Judged | None) -> Row:
    found = summary([run.timings for run in runs if run.timings is not None])
    return Row(
        name,
        median_rate([run.timed for run in runs]),
        ratio([run.timed for run in runs], [run.timed for run in baseline]),
        found.acceptance,
        found.tokens_per_round,
        found.hit_rate,
        judged,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
