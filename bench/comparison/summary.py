"""Each runner's runs taken together, the formula's prediction for such rounds, and the notes under a bench's table.

The formula uses isolated times, and from the run only chain lengths, tokens per round, the share of chains on request,
and the median turnaround.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.comparison.runs import COLOCATED, ModeRunner, PromptRunner, Run
from outrider.bench.timing.loops import IsolatedTimes
from outrider.orchestrator.core.policy.forecasts import Costs, RoundKind, ar_rate, mixed_rate
from outrider.protocol.messages import Timings


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over runs. `tokens`, `rounds` and times are of decoding, without the prompt's round.

    `rows[M]` counts verifies of M tokens. `drafted[i]` counts chains with a token i, `accepted[i]` those in which it
    and all before it held. `asked` counts rounds that waited for a chain on request. `looked_up` and `hits` count
    outcomes by accepted chain tokens. `turnaround_ms` is the median of hits, None without any.
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
        """The share of drafted tokens that held; None without any."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds and sum(self.drafted) else None

    @property
    def hit_rate(self) -> float | None:
        return sum(self.hits) / sum(self.looked_up) if sum(self.looked_up) else None


@dataclass(frozen=True, slots=True)
class FormulaComparison:
    """A round as measured and as the formula predicts, in milliseconds; rates in tokens per second.

    `verify_ms` is the mean verify of the run, `verify_alone_ms` what the same verifies take alone; `between_ms` and
    `between_alone_ms` the target's wait before them.
    """

    measured: float
    predicted: float
    verify_ms: float
    verify_alone_ms: float
    between_ms: float
    between_alone_ms: float

    @property
    def share(self) -> float:
        """Measured over predicted rate."""
        return self.measured / self.predicted


def summary(timings: Sequence[Timings]) -> Summary:
    drafted = _sum([t.drafted_by_position for t in timings])
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
        accepted=_sum([t.accepted_by_position for t in timings]),
        asked=sum(t.draft_waits for t in timings),
        looked_up=_sum([t.looked_up_by_accepted for t in timings]),
        hits=_sum([t.hits_by_accepted for t in timings]),
        turnaround_ms=statistics.median(turnarounds) if turnarounds else None,
    )


def compare_plain(found: Summary, alone: IsolatedTimes) -> FormulaComparison:
    """Compares plain decoding: one token after another, without waits."""
    step_ms = found.decode_ms / found.rounds
    return FormulaComparison(_rate(found), 1000 * ar_rate(alone.costs()), step_ms, alone.step_ms, 0.0, 0.0)


def compare_speculative(found: Summary, alone: IsolatedTimes, depth: int, works_ahead: bool) -> FormulaComparison:
    """Compares SD with this K, or SSD (`works_ahead`), with theorem 7 on the run's own mix of rounds."""
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
    """Returns the run's rounds by verified rows. A chain on request counts with mean length; one from the cache must
    have been drafted during the verify before. Chains longer than K are n-grams, which cost nothing."""
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


def times_of_drafting(costs: Costs, depth: int) -> tuple[float, float]:
    """T_p and T_SD: the work ahead and a chain on request, in units of the verify."""
    verify_ms = costs.verify_ms(depth + 1)
    return costs.tree_ms(depth) / verify_ms, costs.chain_ms(depth) / verify_ms


def _tokens(found: Summary) -> float:
    return found.tokens / found.rounds


def _rate(found: Summary) -> float:
    return 1000 * found.tokens / found.decode_ms


def _sum(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max((len(c) for c in counts), default=0)
    return tuple(sum(c[i] for c in counts if i < len(c)) for i in range(longest))


GIGA = 1e9
# Fewer outcomes are too few for a share.
FEWEST = 5


@dataclass(frozen=True, slots=True)
class RunnerSummary:
    """One of our runners; `depth` is its K, None if that varies or there is none."""

    name: str
    mode: str
    depth: int | None
    summary: Summary


def summaries_of(best: Sequence[PromptRunner], runs: Mapping[str, Sequence[Run]], apart: str) -> list[RunnerSummary]:
    """Returns our runners; names that end with `apart` belong to another table. Colocated ones are excluded: their
    rounds are not the formula's."""
    return [
        RunnerSummary(one.name, one.mode, one.depth, summary([run.timings for run in runs[one.name] if run.timings]))
        for one in best
        if isinstance(one, ModeRunner) and not one.name.endswith(apart) and COLOCATED not in one.name
    ]


def compare_all(subjects: Sequence[RunnerSummary], alone: IsolatedTimes) -> dict[str, FormulaComparison]:
    """Returns the comparison by name: of AR, and of modes with a fixed K."""
    return {s.name: _compare(s, alone) for s in subjects if s.mode == "ar" or s.depth is not None}


def _compare(subject: RunnerSummary, alone: IsolatedTimes) -> FormulaComparison:
    if subject.mode == "ar":
        return compare_plain(subject.summary, alone)
    return compare_speculative(subject.summary, alone, subject.depth or 0, works_ahead=subject.mode == "ssd")


def lines(alone: IsolatedTimes, subjects: Sequence[RunnerSummary], branches: int, weight_bytes: int) -> list[str]:
    """Returns the notes. `weight_bytes` is what the target reads in one forward."""
    comparison = compare_all(subjects, alone)
    depth = next((subject.depth for subject in subjects if subject.mode == "ssd"), None)
    found = [_costs(alone)]
    if depth is not None:
        found.append(_ceiling(alone, depth, branches))
    found += [_round(subject, comparison[subject.name]) for subject in subjects if subject.name in comparison]
    streamed = ", ".join(f"{s.name} {_streamed(s.summary, weight_bytes):.1f}" for s in subjects)
    found.append(f"- target weights read, GB/s while verifying ({weight_bytes / 1e6:.0f} MB a forward): {streamed}")
    found += [f"- accepted by position, {s.name}: {_positions(s.summary)}" for s in subjects if s.depth is not None]
    found += [
        f"- hits by accepted tokens, {s.name}: {_hits(s.summary)}" for s in subjects if sum(s.summary.looked_up) > 0
    ]
    return found


def shares(subject: RunnerSummary) -> str:
    """Returns where the time of this runner's rounds went, without isolated times."""
    found = subject.summary
    whole_ms, verify_ms, idle_ms = (total / found.rounds for total in (found.decode_ms, found.verify_ms, found.idle_ms))
    hits = "" if found.hit_rate is None else f", hits {found.hit_rate:.0%}"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {verify_ms:.2f} + target without work {idle_ms:.2f}"
        f" + rest {whole_ms - verify_ms - idle_ms:.2f}; {found.tokens / found.rounds:.2f} tokens{hits}"
    )


def _costs(alone: IsolatedTimes) -> str:
    first = alone.verify_ms(1)
    rows = ", ".join(f"{rows}: {ms / first:.2f}" for rows, ms in alone.verify_ms.points)
    return (
        f"- alone: a token of plain decoding {alone.step_ms:.2f} ms; c(M), a verify of M tokens, {first:.2f} ms times"
        f" {rows}"
    )


def _ceiling(alone: IsolatedTimes, depth: int, branches: int) -> str:
    ahead, chain = times_of_drafting(alone.costs(), depth)
    return (
        f"- alone, K = {depth}, B = {branches}: work ahead {alone.ahead_ms(depth):.2f} ms, T_p = {ahead:.2f};"
        f" a chain {alone.chain_ms(depth):.2f} ms, T_SD = {chain:.2f}; so SSD can gain at most {1 + chain:.2f}x on SD"
    )


def _round(subject: RunnerSummary, comparison: FormulaComparison) -> str:
    whole_ms = 1000 * subject.summary.tokens / subject.summary.rounds / comparison.measured
    slower = comparison.verify_ms / comparison.verify_alone_ms
    between = f" + between {comparison.between_ms:.2f} (formula {comparison.between_alone_ms:.2f})"
    return (
        f"- a round of {subject.name}: {whole_ms:.2f} ms = verify {comparison.verify_ms:.2f} (alone"
        f" {comparison.verify_alone_ms:.2f}, so {slower:.2f} times){between if comparison.between_alone_ms else ''};"
        f" formula {comparison.predicted:.1f} tok/s, measured {comparison.measured:.1f}"
    )


def _streamed(summary: Summary, weight_bytes: int) -> float:
    return weight_bytes * summary.rounds / (summary.verify_ms / 1000) / GIGA


def _positions(summary: Summary) -> str:
    """How often chain token i and all before it held, of the chains that had one."""
    pairs = zip(summary.accepted, summary.drafted, strict=True)
    return "  ".join(f"{i}: {held / tried:.2f}" for i, (held, tried) in enumerate(pairs, 1) if tried)


def _hits(summary: Summary) -> str:
    pairs = zip(summary.hits, summary.looked_up, strict=False)
    return "  ".join(f"{k}: {hits / tried:.2f} of {tried}" for k, (hits, tried) in enumerate(pairs) if tried >= FEWEST)
