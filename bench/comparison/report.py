"""Tables and pictures of a comparison, for single and for concurrent requests.

Each ratio is over the prompts of one interleaved run. Intervals of concurrent runs are over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIGA = 1e9
ALL_CLASSES, BASELINE = "all", "ar"
Rounds = Sequence[Sequence[Reply]]
FIXED_MODES = ("ar", "sd", "ssd")
PANEL_COLUMNS = 2
OUR_COLOUR, PEER_COLOUR = "#2a9d4e", "#8d6cc9"


def format_runs(runs: Mapping[str, Sequence[Run]], temp: float, threads: tuple[int, int], weight_bytes: int) -> str:
    """Returns a Markdown table of all runners, the fastest first, with a title line and a line about the rounds of each
    mode. `threads`: the target's, and those of all workers. `weight_bytes`: what the target reads in one forward."""
    times = {name: [run.timed for run in found] for name, found in runs.items()}
    against = {name: ratio(found, times[BASELINE]) for name, found in times.items()}
    rows, notes = list[dict[str, str]](), list[str]()
    for name in sorted(runs, key=lambda name: -against[name].value):
        found = summarize([run.timings for run in runs[name] if run.timings is not None])
        rows.append(
            {
                "": name,
                "tok/s (median)": f"{statistics.median(timed.rate for timed in times[name]):.1f}",
                f"relative to {BASELINE} [95 %]": f"{against[name]}",
                "acceptance": _format(found.acceptance, ".0%"),
                "tokens per round": _format(found.tokens_per_round, ".2f"),
                "hit rate": _format(found.hit_rate, ".0%"),
            }
        )
        notes += [describe_round(name, found, weight_bytes)] if found.rounds else []
    repeated = statistics.fmean(repeated_share(run.tokens) for run in runs[BASELINE])
    title = f"T = {temp:g}: {pluralize(len(runs[BASELINE]), 'prompt')}, {repeated:.0%} of 4-grams repeated"
    title += f"; threads: target {threads[0]}, all workers {threads[1]}"
    return "\n".join([title, "", _format_markdown(rows), *(["", *notes] if notes else [])])


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
    if there are runners on both sides. `classes`: the class of each prompt. `threads`: as for `format_runs`."""
    times = {
        kind: {
            name: [run.timed for run, of in zip(found, classes, strict=True) if kind in (ALL_CLASSES, of)]
            for name, found in runs.items()
        }
        for kind in (ALL_CLASSES, *classes)
    }
    same, all_threads = (f", {n} thread{'s' * (n > 1)}" for n in threads)
    ratios = []
    for name, family, others, cores in (
        (f"ar over {LLAMA_CPP}, same number of threads", "ar", [LLAMA_CPP], same),
        ("ssd over ar", "ssd", ["ar"], ""),
        ("ssd over the best sd", "ssd", ["sd"], ""),
        ("auto over the best mode", "auto", ["ar", "sd", "ssd"], ""),
        (f"auto over the best of {LLAMA_CPP}, all cores", "auto", [LLAMA_CPP], all_threads),
        (f"{ONE_PROCESS} over the best of {LLAMA_CPP}", ONE_PROCESS, [LLAMA_CPP], all_threads),
        (f"{ONE_PROCESS} over auto", ONE_PROCESS, ["auto"], ""),
        (f"auto over the best of {MLX_LM}", "auto", [MLX_LM], ""),
    ):
        ours = [runner for runner in runs if _is_in_family(runner, family)]
        theirs = [one for one in runs if one.endswith(cores) and any(_is_in_family(one, other) for other in others)]
        for kind, of_kind in times.items() if ours and theirs else ():
            best, against = (max(names, key=lambda one: total_rate(of_kind[one])) for names in (ours, theirs))
            ratios.append(Ratio(name, kind, against, ratio(of_kind[best], of_kind[against])))
    return ratios


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


def format_concurrent_runs(width: int, temp: float, runs: Mapping[str, Rounds]) -> str:
    """Returns a Markdown table of the runs with `width` concurrent requests, with a title line. They are compared with
    llama.cpp if it ran, else mlx-lm, else the first mode; and auto with the best of ar, sd and ssd."""
    times = {name: list(map(time_replies, rounds)) for name, rounds in runs.items()}
    replies = {name: list(chain(*rounds)) for name, rounds in runs.items()}
    baseline = next(name for name in (LLAMA_CPP, MLX_LM, *times) if name in times)
    rows = [
        {
            "": name,
            "total tok/s [95 %]": f"{bootstrap(times[name], total_rate):.0f}",
            f"relative to {baseline} [95 %]": "" if name == baseline else f"{ratio(times[name], times[baseline])}",
            "first token, ms p50 / p99": _format_percentiles([one.first_ms for one in replies[name]], ".0f"),
            "per token, ms p50 / p99": _format_percentiles([ms for one in replies[name] for ms in one.token_ms], ".1f"),
        }
        for name in runs
    ]
    title = f"{pluralize(width, 'concurrent request')}, T = {temp:g}, {len(times[baseline])} rounds"
    lines = [title, "", _format_markdown(rows)]
    modes = [name for name in FIXED_MODES if name in times]
    if modes and "auto" in times:
        best = max(modes, key=lambda name: total_rate(times[name]))
        lines += ["", f"- auto over {best}, the best fixed mode: {ratio(times['auto'], times[best])}"]
    return "\n".join(lines)


def _format_percentiles(milliseconds: Sequence[float], form: str) -> str:
    p50, p99 = np.percentile(milliseconds, (50, 99))
    return f"{p50:{form}} / {p99:{form}}"


def draw_runs(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> Figure:
    """Draws the rate of each runner relative to the baseline, with a panel for each of the conditions in `runs`."""
    panels = {}
    for conditions, of_name in runs.items():
        times = {name: [run.timed for run in found] for name, found in of_name.items()}
        panels[conditions] = {name: ratio(found, times[BASELINE]) for name, found in times.items()}
    return _draw_panels(panels, f"tokens per second, relative to {BASELINE}")


def draw_concurrent_runs(runs: Mapping[str, Mapping[str, Rounds]]) -> Figure:
    """Draws the total rate of each runner, with a panel for each of the conditions in `runs`."""
    panels = {
        conditions: {name: bootstrap(list(map(time_replies, rounds)), total_rate) for name, rounds in of_name.items()}
        for conditions, of_name in runs.items()
    }
    return _draw_panels(panels, "total tokens per second")


def _draw_panels(panels: Mapping[str, Mapping[str, Interval]], label: str) -> Figure:
    """Draws a panel of horizontal bars with their intervals for each of the conditions."""
    from matplotlib.figure import Figure

    lines, longest = -(-len(panels) // PANEL_COLUMNS), max(map(len, panels.values()))
    columns = min(PANEL_COLUMNS, len(panels))
    figure = Figure(figsize=(6.4 * columns, lines * (1.2 + 0.34 * longest)), layout="constrained")
    for at, (conditions, values) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, at)
        heights = [one.value for one in values.values()]
        errors = [[one.value - one.low for one in values.values()], [one.high - one.value for one in values.values()]]
        colours = [PEER_COLOUR if name.startswith((LLAMA_CPP, MLX_LM)) else OUR_COLOUR for name in values]
        bars = axes.barh(list(values), heights, xerr=errors, color=colours, capsize=3, height=0.72)
        axes.bar_label(bars, fmt="{:.3g}", label_type="center", color="white", fontsize=8)
        axes.invert_yaxis()
        axes.set_title(conditions, fontsize=9, loc="left")
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
