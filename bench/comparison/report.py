"""Tables of a comparison, for single and for concurrent requests.

Each ratio is over the prompts of one interleaved run. Intervals of concurrent runs are over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.comparison.peers import LLAMA_CPP, MLX_LM
from outrider.bench.comparison.runs import (
    ONE_PROCESS,
    Interval,
    Reply,
    Run,
    Summary,
    bootstrap,
    ratio,
    repeated_share,
    summarize,
    time_replies,
    total_rate,
)
from outrider.orchestrator.client.dialogue import pluralize

GIGA = 1e9
ALL_CLASSES, BASELINE = "all", "ar"
Rounds = Sequence[Sequence[Reply]]
FIXED_MODES = ("ar", "sd", "ssd")


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """One runner on one class of prompts; other engines have an empty `summary`."""

    name: str
    median: float
    against: Interval
    summary: Summary


@dataclass(frozen=True, slots=True)
class Section:
    """One class of prompts at one temperature; ratios are to AR. `repeated`: the share of repeated 4-grams.

    `conditions` describe cores and threads; the notes are lines under the table.
    """

    kind: str
    temp: float
    conditions: str
    prompts: int
    repeated: float
    rows: tuple[RunnerRow, ...]
    notes: tuple[str, ...] = ()


def make_sections(
    runs: Mapping[str, list[Run]], classes: Sequence[str], temp: float, threads: tuple[int, int], weight_bytes: int
) -> list[Section]:
    """Summarizes the runs of all classes together and of each class, the fastest runner first. The notes of the first
    section describe rounds. `weight_bytes`: what the target reads in one forward.

    `classes`: the class of each prompt. `threads`: the target's, and those of all workers.
    """
    conditions, sections = f"threads: target {threads[0]}, all workers {threads[1]}", []
    for kind in (ALL_CLASSES, *dict.fromkeys(classes)):
        of_kind, rows, notes = filter_by_class(runs, classes, kind), list[RunnerRow](), list[str]()
        for name, of_name in of_kind.items():
            found = summarize([run.timings for run in of_name if run.timings is not None])
            against = ratio([run.timed for run in of_name], [run.timed for run in of_kind[BASELINE]])
            rows.append(RunnerRow(name, statistics.median(run.timed.rate for run in of_name), against, found))
            if kind == ALL_CLASSES and found.rounds:
                notes.append(describe_round(name, found, weight_bytes))
        repeated = statistics.fmean(repeated_share(run.tokens) for run in of_kind[BASELINE])
        ordered = tuple(sorted(rows, key=lambda row: -row.against.value))
        sections.append(Section(kind, temp, conditions, len(of_kind[BASELINE]), repeated, ordered, tuple(notes)))
    return sections


def describe_round(name: str, found: Summary, weight_bytes: int) -> str:
    """Returns a line with the parts of a runner's mean round. `weight_bytes`: what the target reads in one forward."""
    sums = found.sums
    whole_ms, verify_ms, idle_ms = (total / found.rounds for total in (sums.predicted_ms, sums.verify_ms, sums.idle_ms))
    hits = "" if found.hit_rate is None else f", hit rate {found.hit_rate:.0%}"
    return (
        f"- a round of {name}: {whole_ms:.2f} ms = verify {verify_ms:.2f} + target idle {idle_ms:.2f}"
        f" + rest {whole_ms - verify_ms - idle_ms:.2f}; {found.tokens / found.rounds:.2f} tokens{hits};"
        f" the verifies read {1000 * weight_bytes / verify_ms / GIGA:.1f} GB/s of target weights"
    )


def format_section(found: Section) -> str:
    """Returns a Markdown table with a title line and notes."""
    prompts = pluralize(found.prompts, "prompt")
    head = f"{found.kind}, T = {found.temp:g}: {prompts}, {found.repeated:.0%} of 4-grams repeated"
    rows = [
        {
            "": row.name,
            "tok/s (median)": f"{row.median:.1f}",
            f"relative to {BASELINE} [95 %]": str(row.against),
            "acceptance": _format(row.summary.acceptance, ".0%"),
            "tokens per round": _format(row.summary.tokens_per_round, ".2f"),
            "hit rate": _format(row.summary.hit_rate, ".0%"),
        }
        for row in found.rows
    ]
    lines = [f"{head}; {found.conditions}", "", _format_markdown(rows)]
    return "\n".join([*lines, *(["", *found.notes] if found.notes else [])])


def _format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table of rows, each with its cells by title."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio in one class. `against`: the best runner of the other side."""

    name: str
    kind: str
    against: str
    value: Interval


def compare_families(
    runs: Mapping[str, Sequence[Run]], classes: Sequence[str], threads: tuple[int, int]
) -> list[Ratio]:
    """Returns ratios of the best runner of a family to the best of others, for all classes together and for each class,
    if there are runners on both sides. `classes`: the class of each prompt. `threads`: as for `make_sections`."""
    same, all_threads = (f", {n} thread{'s' * (n > 1)}" for n in threads)
    ratios = []
    for name, family, others, cores in (
        (f"ar over {LLAMA_CPP}, same number of threads", "ar", [LLAMA_CPP], same),
        ("ssd over ar", "ssd", ["ar"], ""),
        ("ssd over the best sd", "ssd", ["sd"], ""),
        ("auto over the best mode", "auto", ["ar", "sd", "ssd"], ""),
        (f"auto over the best of {LLAMA_CPP}, all cores", "auto", [LLAMA_CPP], all_threads),
        (f"{ONE_PROCESS} over the same", ONE_PROCESS, [LLAMA_CPP], all_threads),
        (f"{ONE_PROCESS} over auto", ONE_PROCESS, ["auto"], ""),
        (f"auto over the best of {MLX_LM}", "auto", [MLX_LM], ""),
    ):
        ours = [runner for runner in runs if _is_in_family(runner, family)]
        theirs = [one for one in runs if one.endswith(cores) and any(_is_in_family(one, other) for other in others)]
        for kind in (ALL_CLASSES, *dict.fromkeys(classes)) if ours and theirs else ():
            of_kind = {one: [run.timed for run in found] for one, found in filter_by_class(runs, classes, kind).items()}
            best, against = (max(names, key=lambda one: total_rate(of_kind[one])) for names in (ours, theirs))
            ratios.append(Ratio(name, kind, against, ratio(of_kind[best], of_kind[against])))
    return ratios


def filter_by_class(runs: Mapping[str, Sequence[Run]], classes: Sequence[str], kind: str) -> dict[str, list[Run]]:
    """Returns the runs of one class of prompts, or of `ALL_CLASSES`. `classes`: the class of each prompt."""
    return {
        name: [run for run, run_kind in zip(of_name, classes, strict=True) if kind in (ALL_CLASSES, run_kind)]
        for name, of_name in runs.items()
    }


def format_ratios(found: Sequence[Ratio]) -> str:
    """Returns a Markdown table: a line per ratio, a column per class, and the runner compared with."""
    kinds = list(dict.fromkeys(r.kind for r in found))
    rows = []
    for name in dict.fromkeys(r.name for r in found):
        of_name = {r.kind: r for r in found if r.name == name}
        whole = of_name[ALL_CLASSES]
        cells = {kind: f"{of_name[kind].value.value:.2f}" for kind in kinds} | {ALL_CLASSES: str(whole.value)}
        rows.append({"": name, **cells, "compared with": whole.against})
    return _format_markdown(rows)


def _is_in_family(name: str, family: str) -> bool:
    """Whether a runner is of the family, its name's first word: "sd n-gram K=3" is of "sd"."""
    return name == family or name.startswith((f"{family} ", f"{family},"))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 99th percentile in milliseconds."""

    p50: Interval
    p99: Interval

    def __format__(self, form: str) -> str:
        form = form or ".0f"
        return f"{self.p50.value:{form}} / {self.p99.value:{form}}"


@dataclass(frozen=True, slots=True)
class ConcurrentRow:
    """One runner at one concurrency: tokens per second of all requests, their ratio to the baseline's, and the time to
    first token and per token as clients see it."""

    name: str
    rate: Interval
    against: Interval | None
    first_ms: Percentiles
    token_ms: Percentiles


@dataclass(frozen=True, slots=True)
class ConcurrentSection:
    """One concurrency, compared with `baseline`: llama.cpp if it ran, else mlx-lm, else the first mode.

    `auto_over_best`: auto over `best`, the best of ar, sd and ssd, if all of them ran.
    """

    width: int
    temp: float
    rounds: int
    rows: tuple[ConcurrentRow, ...]
    baseline: str
    best: str | None
    auto_over_best: Interval | None

    def row(self, name: str) -> ConcurrentRow:
        return next(row for row in self.rows if row.name == name)


def make_concurrent_section(width: int, temp: float, found: Mapping[str, Rounds]) -> ConcurrentSection:
    """Summarizes runs, in the given order."""
    times = {name: [time_replies(replies) for replies in rounds] for name, rounds in found.items()}
    baseline = next(name for name in (LLAMA_CPP, MLX_LM, *times) if name in times)
    rows = tuple(
        ConcurrentRow(
            name,
            bootstrap(times[name], total_rate),
            ratio(times[name], times[baseline]) if name != baseline else None,
            estimate_percentiles([[reply.first_ms for reply in replies] for replies in rounds]),
            estimate_percentiles([[ms for reply in replies for ms in reply.token_ms] for replies in rounds]),
        )
        for name, rounds in found.items()
    )
    modes = [name for name in FIXED_MODES if name in times]
    best = max(modes, key=lambda name: total_rate(times[name])) if modes and "auto" in times else None
    auto = ratio(times["auto"], times[best]) if best is not None else None
    return ConcurrentSection(width, temp, len(next(iter(times.values()))), rows, baseline, best, auto)


def estimate_percentiles(rounds: Sequence[Sequence[float]]) -> Percentiles:
    """Estimates both percentiles of the milliseconds of all rounds."""
    arrays = list(map(np.array, rounds))

    def at(share: int) -> Interval:
        return bootstrap(arrays, lambda chosen: float(np.percentile(np.concatenate(chosen), share)))

    return Percentiles(at(50), at(99))


def format_concurrent_section(found: ConcurrentSection) -> str:
    """Returns a Markdown table with a title line."""
    rows = [
        {
            "": row.name,
            "total tok/s [95 %]": f"{row.rate:.0f}",
            f"relative to {found.baseline} [95 %]": str(row.against or ""),
            "first token, ms p50 / p99": f"{row.first_ms}",
            "per token, ms p50 / p99": f"{row.token_ms:.1f}",
        }
        for row in found.rows
    ]
    head = f"{pluralize(found.width, 'concurrent request')}, T = {found.temp:g}, {found.rounds} rounds"
    lines = [head, "", _format_markdown(rows)]
    if found.auto_over_best is not None:
        lines += ["", f"- auto over {found.best}, the best fixed mode: {found.auto_over_best}"]
    return "\n".join(lines)
