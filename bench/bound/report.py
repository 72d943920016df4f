"""The bound for people: what was measured, a Markdown table of who could bring what at most, and what that forbids."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.bound.times import ALL, ALONE, ONE, ROWS, Times
from outrider.bench.bound.ways import Brought
from outrider.bench.contest.statistics import Interval, Timed, ratio, total_rate
from outrider.bench.timing.curve import Curve, medians

GOAL = 1.15
TITLES = (
    "drafts",
    "tokens a verify, rows, K",
    "over AR",
    "over today's best",
    "with its misses and gaps",
    "if it grew 1 branch",
    "if free",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to draft at its best: `counted` as it works today, at the `least` that it must do, and `free`.

    `foreseeing`: no drafter can draft so.
    """

    name: str
    foreseeing: bool
    counted: Brought
    least: Brought
    free: Brought


def pooled(times: Sequence[Times], branches: int) -> Curve:
    curves = [one.verify_ms[branches] for one in times]
    return medians({rows: [curve.milliseconds(rows) for curve in curves] for rows in ROWS})


def times_lines(times: Sequence[Times]) -> list[str]:
    names = {ALONE: "alone", ONE: "beside 1 branch", ALL: f"beside {ALL} branches"}
    alone, lines = pooled(times, ALONE), []
    for branches, name in names.items():
        points = pooled(times, branches).points
        told = ", ".join(f"{rows}: {ms:.2f} ({ms / alone.milliseconds(rows):.2f})" for rows, ms in points)
        lines.append(f"- a verify {name}, ms by rows (over alone): {told}")
    for name, curve in times[0].drafting_ms.items():
        found = {count: [one.drafting_ms[name].milliseconds(count) for one in times] for count, _ in curve.points}
        told = ", ".join(f"{count}: {statistics.median(ms):.2f}" for count, ms in found.items())
        lines.append(f"- {name} in the target's process, ms by tokens drafted: {told}")
    return lines


def modes_lines(modes: Mapping[str, Sequence[Timed]], baseline: str) -> list[str]:
    ordered = sorted(modes, key=lambda name: -total_rate(modes[name]))
    rates = {name: f"{total_rate(modes[name]):.1f} tokens/s" for name in ordered}
    return [f"- {name}: {rate}, over {baseline} {ratio(modes[name], modes[baseline])}" for name, rate in rates.items()]


def table(rows: Sequence[Row], plain: Sequence[Timed], today: Sequence[Timed]) -> str:
    """`rows`: the first is what drafts in today's best."""
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for row in rows:
        counted = row.counted
        cells = [row.name, f"{counted.per_verify:.2f}, {counted.rows:.1f}, {counted.depth}"]
        cells += [str(ratio(counted.timed, plain)), str(ratio(counted.timed, today))]
        cells.append(str(ratio(counted.timed, rows[0].counted.timed)))
        cells += [str(ratio(one.timed, today)) for one in (row.least, row.free)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row], today: Sequence[Timed]) -> list[str]:
    """What the best of all ways allows, as drafters work today and at the least that they must do.

    The first of `rows` drafts in today's best. What that loses to outcomes that were not prepared and between its
    rounds, a better drafter in its place loses too, and with two of them there no more outcomes are prepared.
    """
    possible = [row for row in rows if not row.foreseeing]
    told = {"counted": possible, "least": possible, "free": possible, "counted, foreseeing": rows}
    lines = []
    for case, among in told.items():
        name, best = max(_case(among, case.partition(",")[0]), key=lambda named: total_rate(named[1].timed))
        against = ratio(best.timed, today)
        lines.append(f"- {case}: at most {against} of today's best, by {name}: {judged(against)}")
    row = max(rows, key=lambda row: total_rate(row.counted.timed))
    against = ratio(row.counted.timed, rows[0].counted.timed)
    lines.append(
        f"- with today's misses and gaps, foreseeing: {against} of today's best, by {row.name}: {judged(against)}"
    )
    return lines


def _case(rows: Sequence[Row], case: str) -> Iterator[tuple[str, Brought]]:
    for row in rows:
        yield row.name, {"counted": row.counted, "least": row.least, "free": row.free}[case]


def judged(against: Interval) -> str:
    if against.high < GOAL:
        return f"{GOAL} times is out of reach"
    return f"{GOAL} times is {'not forbidden' if against.low >= GOAL else 'neither forbidden nor allowed by this'}"
