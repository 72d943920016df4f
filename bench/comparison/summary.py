"""Summarizes each runner's runs, compares them with the formula's prediction, and writes the notes under the tables.

The formula takes times in isolation, and from the run only chain lengths, tokens per round, the share of chains on
request, and the median turnaround.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.comparison.runs import COLOCATED, ModeRunner, PromptRunner, Run
from outrider.bench.timing import IsolatedTimes
from outrider.orchestrator.core.policy.forecasts import RoundKind, ar_rate, ceiling, mixed_rate
from outrider.protocol.messages import Timings
from outrider.protocol.stats import each


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over runs. `tokens`, `rounds` and times are of decoding, without the prompt's round.

    `rows[M]` counts verifies of M tokens. `drafted[i]` counts chains with a token i, `accepted[i]` those with tokens 0
    to i accepted. `asked` counts rounds that waited for a chain on request. `looked_up` and `hits` count outcomes by
    accepted chain tokens. `turnaround_ms` is the median of hits, None without hits.
    """

    tokens: int
    rounds: int
    decode_ms: float
    verify_ms: float
    idle_ms: float
    rows: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    asked: int
    looked_up: tuple[int, ...]
    hits: tuple[int, ...]
    turnaround_ms: float | None

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None without drafted tokens."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds and sum(self.drafted) else None

    @property
    def hit_rate(self) -> float | None:
        return sum(self.hits) / sum(self.looked_up) if sum(self.looked_up) else None


@dataclass(frozen=True, slots=True)
class FormulaComparison:
    """A round as measured and as predicted, in milliseconds; rates in tokens per second.

    `verify_ms` is the run's mean verify, `verify_alone_ms` the mean of the same verifies in isolation; `between_ms` and
    `between_alone_ms` are the target's waits before them.
    """

    measured: float
    predicted: float
    verify_ms: float
    verify_alone_ms: float
    between_ms: float
    between_alone_ms: float

    @property
    def share(self) -> float:
        """The measured rate divided by the predicted rate."""
        return self.measured / self.predicted


def summary(timings: Sequence[Timings]) -> Summary:
    drafted = each(*(t.drafted_by_position for t in timings))
    rounds = sum(max(t.rounds - 1, 0) for t in timings)
    longest = [*drafted, 0]
    chains = [longest[i] - longest[i + 1] for i in range(len(drafted))]
    turnarounds = [ms for t in timings for ms in t.turnaround_ms]
    return Summary(
        tokens=sum(t.predicted_n - 1 for t in timings),
        rounds=rounds,
        decode_ms=sum(t.predicted_ms for t in timings),
        verify_ms=sum(t.verify_ms for t in timings),
        idle_ms=sum(t.idle_ms for t in timings),
        rows=(0, max(rounds - sum(chains), 0), *chains),
        drafted=drafted,
        accepted=each(*(t.accepted_by_position for t in timings)),
        asked=sum(t.draft_waits for t in timings),
        looked_up=each(*(t.looked_up_by_accepted for t in timings)),
        hits=each(*(t.hits_by_accepted for t in timings)),
        turnaround_ms=statistics.median(turnarounds) if turnarounds else None,
    )


def compare_plain(found: Summary, alone: IsolatedTimes) -> FormulaComparison:
    """Compares plain decoding: steps one after another, without waits."""
    step_ms = found.decode_ms / found.rounds
    return FormulaComparison(_rate(found), 1000 * ar_rate(alone.costs()), step_ms, alone.step_ms, 0.0, 0.0)


def compare_speculative(found: Summary, alone: IsolatedTimes, depth: int, works_ahead: bool) -> FormulaComparison:
    """Compares SD with this K, or SSD (`works_ahead`), with theorem 7 for the run's mix of rounds."""
    costs = alone.costs(found.turnaround_ms)
    kinds = kinds_of(found, depth, works_ahead)
    verify_alone_ms = sum(kind.share * alone.verify_ms(kind.rows) for kind in kinds)
    predicted = mixed_rate(costs, kinds)
    return FormulaComparison(
        _rate(found),
        1000 * predicted,
        found.verify_ms / found.rounds,
        verify_alone_ms,
        found.idle_ms / found.rounds,
        _tokens(found) / predicted - verify_alone_ms,
    )


def kinds_of(found: Summary, depth: int, works_ahead: bool) -> list[RoundKind]:
    """Returns the run's rounds by verified rows. A chain on request counts with the mean length; a chain from the cache
    was drafted during the previous verify. Chains longer than K are n-grams, which cost nothing."""
    chains = sum(found.rows[2:])
    drafted = sum(count * min(rows - 1, depth) for rows, count in enumerate(found.rows) if rows > 1)
    mean = round(drafted / chains) if chains else 0
    asked = min(found.asked / found.rounds, 1.0)
    kinds = []
    for rows, count in enumerate(found.rows):
        share = count / found.rounds
        ahead = rows - 1 if works_ahead and rows <= depth + 1 else 0
        kinds.append(RoundKind(share * asked, rows, _tokens(found), asked=mean))
        kinds.append(RoundKind(share * (1.0 - asked), rows, _tokens(found), ahead=ahead))
    return [kind for kind in kinds if kind.share > 0]


def _tokens(found: Summary) -> float:
    return found.tokens / found.rounds


def _rate(found: Summary) -> float:
    return 1000 * found.tokens / found.decode_ms


GIGA = 1e9
# The fewest outcomes from which a share is computed.
FEWEST = 5


@dataclass(frozen=True, slots=True)
class RunnerSummary:
    """One of our runners. `depth` is its K, None if K varies or the runner does not draft."""

    name: str
    mode: str
    depth: int | None
    summary: Summary


def summaries_of(best: Sequence[PromptRunner], runs: Mapping[str, Sequence[Run]], apart: str) -> list[RunnerSummary]:
    """Summarizes our runners, except those with names that end with `apart`, which belong to another table, and
    colocated ones, which the formula does not describe."""
    return [
        RunnerSummary(
            runner.name, runner.mode, runner.depth, summary([run.timings for run in runs[runner.name] if run.timings])
        )
        for runner in best
        if isinstance(runner, ModeRunner) and not runner.name.endswith(apart) and COLOCATED not in runner.name
    ]


def compare_all(subjects: Sequence[RunnerSummary], alone: IsolatedTimes) -> dict[str, FormulaComparison]:
    """Returns comparisons by name, for AR and for modes with a fixed K."""
    plain = {s.name: compare_plain(s.summary, alone) for s in subjects if s.mode == "ar"}
    return plain | {
        s.name: compare_speculative(s.summary, alone, s.depth, works_ahead=s.mode == "ssd")
        for s in subjects
        if s.mode != "ar" and s.depth is not None
    }


def lines(alone: IsolatedTimes, subjects: Sequence[RunnerSummary], branches: int, weight_bytes: int) -> list[str]:
    """Returns the notes. `weight_bytes`: what the target reads in one forward."""
    comparison = compare_all(subjects, alone)
    depth = next((subject.depth for subject in subjects if subject.mode == "ssd"), None)
    first = alone.verify_ms(1)
    rows = ", ".join(f"{rows}: {ms / first:.2f}" for rows, ms in alone.verify_ms.points)
    notes = [
        f"- in isolation: a token of plain decoding {alone.step_ms:.2f} ms; c(M), a verify of M tokens, {first:.2f} ms"
        f" times {rows}"
    ]
    if depth is not None:
        costs = alone.costs()
        ahead, bound = costs.tree_ms(depth) / alone.verify_ms(depth + 1), ceiling(costs, depth)
        notes.append(
            f"- in isolation, K = {depth}, B = {branches}: work ahead {alone.ahead_ms(depth):.2f} ms, T_p ="
            f" {ahead:.2f}; a chain {alone.chain_ms(depth):.2f} ms, T_SD = {bound - 1:.2f}; upper bound of SSD over SD:"
            f" {bound:.2f}x"
        )
    notes += [_round(subject, comparison[subject.name]) for subject in subjects if subject.name in comparison]
    read = {s.name: weight_bytes * s.summary.rounds / (s.summary.verify_ms / 1000) / GIGA for s in subjects}
    streamed = ", ".join(f"{name} {rate:.1f}" for name, rate in read.items())
    notes.append(f"- target weights read during verifies, GB/s ({weight_bytes / 1e6:.0f} MB per forward): {streamed}")
    for subject in (subject for subject in subjects if subject.depth is not None):
        pairs = zip(subject.summary.accepted, subject.summary.drafted, strict=True)
        text = "  ".join(f"{at}: {held / tried:.2f}" for at, (held, tried) in enumerate(pairs, 1) if tried)
        notes.append(f"- acceptance by position, {subject.name}: {text}")
    for subject in (subject for subject in subjects if sum(subject.summary.looked_up) > 0):
        found = enumerate(zip(subject.summary.hits, subject.summary.looked_up, strict=False))
        text = "  ".join(f"{k}: {hits / tried:.2f} of {tried}" for k, (hits, tried) in found if tried >= FEWEST)
        notes.append(f"- hit rate by accepted tokens, {subject.name}: {text}")
    return notes


def shares(subject: RunnerSummary) -> str:
    """Returns a note on how a round of this runner divides into verify, idle target and the rest."""
    found = subject.summary
    whole_ms, verify_ms, idle_ms = (total / found.rounds for total in (found.decode_ms, found.verify_ms, found.idle_ms))
    hits = "" if found.hit_rate is None else f", hit rate {found.hit_rate:.0%}"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {verify_ms:.2f} + target idle {idle_ms:.2f}"
        f" + rest {whole_ms - verify_ms - idle_ms:.2f}; {found.tokens / found.rounds:.2f} tokens{hits}"
    )


def _round(subject: RunnerSummary, comparison: FormulaComparison) -> str:
    whole_ms = 1000 * subject.summary.tokens / subject.summary.rounds / comparison.measured
    slower = comparison.verify_ms / comparison.verify_alone_ms
    between = f" + between {comparison.between_ms:.2f} (predicted {comparison.between_alone_ms:.2f})"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {comparison.verify_ms:.2f} ({slower:.2f} times the"
        f" {comparison.verify_alone_ms:.2f} in isolation){between if comparison.between_alone_ms else ''};"
        f" predicted {comparison.predicted:.1f} tok/s, measured {comparison.measured:.1f}"
    )
