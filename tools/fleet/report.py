"""Describes the outcome of a fleet's simulation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.orchestrator.client.dialogue import pluralize
from tools.fleet.job import Job
from tools.fleet.plan import Loss
from tools.fleet.simulation import Outcome
from tools.fleet.tally import percentile

COLUMNS = (
    "requests/s", "sent", "tok/s", "good tok/s", "first token p50", "p99", "queued p50", "p99", "targets busy",
)  # fmt: skip
SMOOTHING_SECONDS, BEFORE_SECONDS, WINDOW_SECONDS = 10, 15, 30
# The fleet has recovered when its smoothed rate reaches this share of the rate before the loss.
RECOVERED_RATIO = 0.95


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Returns a Markdown table with a line per load."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, outcome in outcomes.items():
        found = outcome.sums
        seconds = [f"{value:.1f} s" for value in (*found.first, *found.queued)]
        cells = [name, str(found.asked), f"{found.rate:.0f}", f"{found.good:.0f}", *seconds, f"{found.busy:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_loss(outcome: Outcome, loss: Loss, without: Outcome | None = None) -> str:
    """Returns a description of the cost of a loss, compared with the same traffic `without` it if given."""
    tally, at = outcome.tally, int(loss.at)
    interrupted = [job for job in tally.jobs if job.interruptions]
    waits = [_count_queued(outcome, begin, begin + WINDOW_SECONDS) for begin in (at - WINDOW_SECONDS, at)]
    waiting = max((sample.waiting for sample in tally.samples[at:]), default=0)
    missing = _describe_missing(outcome, without, at) if without is not None else ""
    return (
        f"lost at {loss.at:g} s: {_describe_recovery(outcome, at)}; at most {waiting} requests waited.{missing}\n"
        f"{len(interrupted)} requests interrupted, {sum(job.is_complete for job in interrupted)} of them complete by"
        f" the end{_describe_gaps(interrupted, loss.at)}.\n"
        f"Sent in the {WINDOW_SECONDS} s before and after: first token p99 {waits[0][1]:.1f} and {waits[1][1]:.1f} s;"
        f" over a second in the queue {waits[0][0]} and {waits[1][0]} requests."
    )


def _describe_recovery(outcome: Outcome, at: int) -> str:
    """Returns the rates before and after the loss, and when it had recovered."""
    tokens, seconds = outcome.tally.tokens, len(outcome.tally.samples) - 1
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


def _describe_missing(outcome: Outcome, without: Outcome, at: int) -> str:
    """Returns the share of tokens after the loss, of the tokens without it; empty if there are none without it."""
    end = len(outcome.tally.samples) - 1
    near, whole = (
        [sum(one.tally.tokens[second] for second in range(at, until)) for one in (outcome, without)]
        for until in (min(at + WINDOW_SECONDS, end), end)
    )
    if not near[1]:
        return ""
    return (
        f" Share of the tokens without the loss: {near[0] / near[1]:.0%} in the {WINDOW_SECONDS} s after,"
        f" {whole[0] / whole[1]:.0%} until the end."
    )


def _count_queued(outcome: Outcome, begin: float, end: float) -> tuple[int, float]:
    """Returns, of the requests sent in this time, how many queued for over a second, and the p99 of the first token."""
    now = len(outcome.tally.samples) - 1
    jobs = [job for job in outcome.tally.jobs if begin <= job.asked < end]
    firsts = [(now if job.first is None else job.first) - job.asked for job in jobs]
    waited = sum((now if job.begun is None else job.begun) - job.asked > 1.0 for job in jobs)
    return waited, percentile(firsts, 0.99)


def describe_difference(one: Outcome, other: Outcome) -> str:
    """Returns how far the first outcome differs from the second, in percent."""
    ours, theirs = one.sums, other.sums
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
