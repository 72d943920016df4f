"""What a contest showed: tables, ratios between contestants, and a picture.

`ContestantRow`: what a contest showed: a table for people. Knows runs and numbers; nothing of how they came about. The
picture is `outrider.bench.contest.report`.

`ratios`: what is asked of a suite in one number each: our modes against each other and against other engines, by
class. Knows runs and names of contestants; each ratio is over the prompts of one run, in turns.

`draw`: a picture of a contest: bars of each contestant's ratio to the baseline with their intervals, one panel a
table.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench import picture
from outrider.bench.contest.contest import Interval, Run, median_rate, ratio, repeated_share, total_rate
from outrider.bench.contest.peers import LLAMA_CPP, MLX_LM
from outrider.bench.contest.summary import Judged, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class ContestantRow:
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
    rows: tuple[ContestantRow, ...]
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


def _row(name: str, runs: Sequence[Run], baseline: Sequence[Run], judged: Judged | None) -> ContestantRow:
    found = summary([run.timings for run in runs if run.timings is not None])
    return ContestantRow(
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


ALL = "all"


@dataclass(frozen=True, slots=True)
class Asked:
    """`name` of the ratio, the contestants whose best is on either side, and the threads of theirs, if that counts."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One ratio in one class: `against` is the contestant that was the best of theirs."""

    name: str
    kind: str
    against: str
    value: Interval


def questions(threads: int) -> tuple[Asked, ...]:
    """`threads`: of each of our workers."""
    return (
        Asked(f"ar over {LLAMA_CPP}, as many threads", ("ar",), (LLAMA_CPP,), threads),
        Asked("ssd over ar", ("ssd",), ("ar",)),
        Asked("ssd over the best sd", ("ssd",), ("sd",)),
        Asked("auto over the best mode", ("auto",), ("ar", "sd", "ssd")),
        Asked(f"auto over the best of {LLAMA_CPP}, both cores", ("auto",), (LLAMA_CPP,), 2 * threads),
        Asked(f"auto over the best of {MLX_LM}", ("auto",), (MLX_LM,)),
    )


def ratios(runs: Mapping[str, Sequence[Run]], classes: Sequence[str], threads: int) -> list[Found]:
    """Every question that has contestants on both sides, for all classes together and for each; `classes` names the
    class of each prompt, in the order of the runs."""
    found = []
    for asked in questions(threads):
        for kind in (ALL, *dict.fromkeys(classes)):
            of_kind = {
                name: [run.timed for run, its in zip(made, classes, strict=True) if kind in (ALL, its)]
                for name, made in runs.items()
            }
            rates = {name: total_rate(timed) for name, timed in of_kind.items()}
            ours = [name for name in runs if _is_one_of(name, asked.ours, None)]
            theirs = [name for name in runs if _is_one_of(name, asked.theirs, asked.threads)]
            if ours and theirs:
                best, against = (max(names, key=rates.__getitem__) for names in (ours, theirs))
                found.append(Found(asked.name, kind, against, ratio(of_kind[best], of_kind[against])))
    return found


def ratio_table(found: Sequence[Found]) -> str:
    """A Markdown table: a line for each ratio, a column for each class, and what all classes were held against."""
    kinds = list(dict.fromkeys(one.kind for one in found))
    lines = [f"| | {' | '.join(kinds)} | held against |", "|---" * (len(kinds) + 2) + "|"]
    for name in dict.fromkeys(one.name for one in found):
        of_name = {one.kind: one for one in found if one.name == name}
        cells = [str(of_name[ALL].value), *(f"{of_name[kind].value.value:.2f}" for kind in kinds if kind != ALL)]
        lines.append(f"| {name} | {' | '.join(cells)} | {of_name[ALL].against} |")
    return "\n".join(lines)


def _is_one_of(name: str, families: Sequence[str], threads: int | None) -> bool:
    """A family is the first word of a name: "sd" is "sd n-gram K=3" and not "ssd K=3"; a peer's draft is its own."""
    if threads is not None and not name.endswith(f", {threads} thread{'s' * (threads > 1)}"):
        return False
    return any(name == family or name.startswith((f"{family} ", f"{family},")) for family in families)


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
