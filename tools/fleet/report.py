"""Describes the result of a fleet's simulation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.orchestrator.client.dialogue import pluralize
from tools.fleet.job import Job
from tools.fleet.metrics import percentile
from tools.fleet.plan import Loss
from tools.fleet.simulation import FleetResult

COLUMNS = (
    "requests/s", "sent", "tok/s", "good tok/s", "first token p50", "p99", "queued p50", "p99", "targets busy",
)  # fmt: skip
SMOOTHING_SECONDS, BEFORE_SECONDS, WINDOW_SECONDS = 10, 15, 30
# The fleet has recovered when its smoothed rate reaches this share of the rate before the loss.
RECOVERED_RATIO = 0.95


def table(results: Mapping[str, FleetResult]) -> str:
    """Returns a Markdown table with a line per load."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, result in results.items():
        found = result.summary
        seconds = [f"{value:.1f} s" for value in (*found.first, *found.queued)]
        cells = [name, str(found.asked), f"{found.rate:.0f}", f"{found.good:.0f}", *seconds, f"{found.busy:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_loss(result: FleetResult, loss: Loss, without: FleetResult | None = None) -> str:
    """Returns a description of the cost of a loss, compared with the same traffic `without` it if given."""
    metrics, at = result.metrics, int(loss.at)
    interrupted = [job for job in metrics.jobs if job.interruptions]
    waits = [_count_queued(result, begin, begin + WINDOW_SECONDS) for begin in (at - WINDOW_SECONDS, at)]
    waiting = max((sample.waiting for sample in metrics.samples[at:]), default=0)
    missing = _describe_missing(result, without, at) if without is not None else ""
    return (
        f"lost at {loss.at:g} s: {_describe_recovery(result, at)}; at most {waiting} requests waited.{missing}\n"
        f"{len(interrupted)} requests interrupted, {sum(job.is_complete for job in interrupted)} of them complete by"
        f" the end{_describe_gaps(interrupted, loss.at)}.\n"
        f"Sent in the {WINDOW_SECONDS} s before and after: first token p99 {waits[0][1]:.1f} and {waits[1][1]:.1f} s;"
        f" over a second in the queue {waits[0][0]} and {waits[1][0]} requests."
    )


def _describe_recovery(result: FleetResult, at: int) -> str:
    """Returns the rates before and after the loss, and when it had recovered."""
    tokens, seconds = result.metrics.tokens, len(result.metrics.samples) - 1
    after = [
        sum(tokens[second + n] for n in range(SMOOTHING_SECONDS)) / SMOOTHING_SECONDS
        for second in range(at, seconds - SMOOTHING_SECONDS)
    ]
    lowest = min(after, default=0.0)
    lost = f"at least {lowest:.0f} tok/s after ({SMOOTHING_SECONDS} s)"
    if at == 0:
        return lost
    first = max(at - BEFORE_SECONDS, 0)
    before = sum(tokens[second] for second in range(first, at)) / (at - first)
    whole = next(
        (n for n in range(len(after)) if n > after.index(lowest) and after[n] >= RECOVERED_RATIO * before), None
    )
    recovery = f"recovered after {whole} s" if whole is not None else "not recovered before the end"
    return f"{before:.0f} tok/s before, {lost}, {recovery}"


def _describe_gaps(interrupted: Sequence[Job], at: float) -> str:
    """Returns the longest gaps in the texts that had begun; others have only waited for their first token."""
    gaps = [job.gap for job in interrupted if job.first is not None and job.first <= at]
    if not gaps:
        return ""
    p50, p99, longest = percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps)
    return f"; longest gap in {pluralize(len(gaps), 'text')}: p50 {p50:.1f} s, p99 {p99:.1f} s, longest {longest:.1f} s"


def _describe_missing(result: FleetResult, without: FleetResult, at: int) -> str:
    """Returns the share of tokens after the loss, of the tokens without it; empty if there are none without it."""
    end = len(result.metrics.samples) - 1
    near, whole = (
        [sum(one.metrics.tokens[second] for second in range(at, until)) for one in (result, without)]
        for until in (min(at + WINDOW_SECONDS, end), end)
    )
    if not near[1]:
        return ""
    return (
        f" Share of the tokens without the loss: {near[0] / near[1]:.0%} in the {WINDOW_SECONDS} s after,"
        f" {whole[0] / whole[1]:.0%} until the end."
    )


def _count_queued(result: FleetResult, begin: float, end: float) -> tuple[int, float]:
    """Returns, of the requests sent in this time, how many queued for over a second, and the p99 of the first token."""
    now = len(result.metrics.samples) - 1
    jobs = [job for job in result.metrics.jobs if begin <= job.sent < end]
    firsts = [(now if job.first is None else job.first) - job.sent for job in jobs]
    waited = sum((now if job.started is None else job.started) - job.sent > 1.0 for job in jobs)
    return waited, percentile(firsts, 0.99)


def describe_difference(one: FleetResult, other: FleetResult) -> str:
    """Returns how far the first result differs from the second, in percent."""
    ours, theirs = one.summary, other.summary
    pairs = {
        "tok/s": (ours.rate, theirs.rate),
        "good tok/s": (ours.good, theirs.good),
        "first token p50": (ours.first[0], theirs.first[0]),
        "p99": (ours.first[1], theirs.first[1]),
        "busy": (ours.busy, theirs.busy),
    }
    errors = [f"{name} {100 * (mine / their - 1):+.1f} %" for name, (mine, their) in pairs.items() if their]
    queued = f"queued p99 {ours.queued[1]:.1f} s and {theirs.queued[1]:.1f} s"
    return f"flow over rounds: {', '.join(errors)}; {queued}"
