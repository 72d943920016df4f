"""What came of a fleet, as text."""

from __future__ import annotations

from collections.abc import Mapping

from tools.fleet.plan import Loss
from tools.fleet.simulation import Outcome
from tools.fleet.tally import Sums, percentile

COLUMNS = (
    "requests/s", "asked", "tok/s", "good tok/s", "first token p50", "p99", "queued p50", "p99", "targets busy",
)  # fmt: skip
SMOOTH, AROUND = 10, 30
# The fleet is whole again where so many seconds in a row bring this share of what it brought before.
WHOLE = 0.95


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A line for each, by its load."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, outcome in outcomes.items():
        found = outcome.sums
        seconds = [f"{value:.1f} s" for value in (*found.first, *found.queued)]
        cells = [name, str(found.asked), f"{found.rate:.0f}", f"{found.good:.0f}", *seconds, f"{found.busy:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(outcome: Outcome, loss: Loss, without: Outcome | None = None) -> str:
    """What the loss cost; `without` it the same traffic brought that."""
    tally, found, at = outcome.tally, outcome.sums, int(loss.at)
    before = sum(tally.tokens[second] for second in range(at - 15, at)) / 15
    seconds = len(tally.looks) - 1
    after = [sum(tally.tokens[second + n] for n in range(SMOOTH)) / SMOOTH for second in range(at, seconds - SMOOTH)]
    lowest = min(after, default=0.0)
    whole = next((n for n in range(len(after)) if n > after.index(lowest) and after[n] >= WHOLE * before), None)
    again = f"whole again after {whole} s" if whole is not None else "not whole again before the end"
    waiting = max(look.waiting for look in tally.looks[at:]) if tally.looks[at:] else 0
    broken = [job for job in tally.jobs if job.broken]
    waits = [_queued(outcome, begin, begin + AROUND) for begin in (at - AROUND, at)]
    missing = f" {_missing(outcome, without, at)}" if without is not None else ""
    return (
        f"lost at {loss.at:g} s: {before:.0f} tok/s before, {lowest:.0f} at the lowest ({SMOOTH} s), {again};"
        f" at most {waiting} waited.{missing}\n"
        f"{found.broken} requests broken off, {sum(job.is_over for job in broken)} of them complete by the end;"
        f" longest gap p50 {found.gaps[0]:.1f} s, p99 {found.gaps[1]:.1f} s, longest {found.gaps[2]:.1f} s.\n"
        f"Asked in the {AROUND} s before it and after: first token p99 {waits[0][1]:.1f} and {waits[1][1]:.1f} s;"
        f" queued over a second {waits[0][0]} and {waits[1][0]} requests."
    )


def _missing(outcome: Outcome, without: Outcome, at: int) -> str:
    """What was not said in the time after, of what would have been."""
    spans = [sum(one.tally.tokens[second] for second in range(at, at + AROUND)) for one in (outcome, without)]
    end = len(outcome.tally.looks) - 1
    whole = [sum(one.tally.tokens[second] for second in range(at, end)) for one in (outcome, without)]
    return (
        f"Of what the same traffic brings without: {spans[0] / spans[1]:.0%} in the {AROUND} s after,"
        f" {whole[0] / whole[1]:.0%} until the end."
    )


def _queued(outcome: Outcome, begin: float, end: float) -> tuple[int, float]:
    """How many of those that were asked then waited over a second for their turn, and the first token's p99."""
    now = len(outcome.tally.looks) - 1
    jobs = [job for job in outcome.tally.jobs if begin <= job.asked < end]
    firsts = [(now if job.first is None else job.first) - job.asked for job in jobs]
    waited = sum((now if job.begun is None else job.begun) - job.asked > 1.0 for job in jobs)
    return waited, percentile(firsts, 0.99)


def difference(one: Outcome, other: Outcome) -> str:
    """How far the first is from the second."""
    ours, theirs = one.sums, other.sums
    pairs = {
        "tok/s": (ours.rate, theirs.rate),
        "good tok/s": (ours.good, theirs.good),
        "first token p50": (ours.first[0], theirs.first[0]),
        "p99": (ours.first[1], theirs.first[1]),
        "busy": (ours.busy, theirs.busy),
    }
    told = [f"{name} {100 * (mine / their - 1):+.1f} %" for name, (mine, their) in pairs.items() if their]
    return f"flow over rounds: {', '.join(told)}; {_queues(ours, theirs)}"


def _queues(ours: Sums, theirs: Sums) -> str:
    return f"queued p99 {ours.queued[1]:.1f} s and {theirs.queued[1]:.1f} s"
