"""All runs of one contestant taken together: its rounds as they were made, and what the formula says such rounds take.

The formula gets times measured alone, and of the run itself only its odds (how long the chains were, what they
brought, how often a drafter had to be asked) and its median turnaround.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.timing.alone import Alone
from outrider.orchestrator.core.learning.speedup import Costs, Kind, ar_rate, mixed_rate
from outrider.protocol.messages import Timings


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over runs. `tokens`, `rounds` and times are of decoding, the prompt's own round left out.

    `rows[M]` counts verifies of M tokens; `drafted[i]` chains that had a token i, `accepted[i]` those in which it and
    all before it held; `asked` rounds waited for a just-in-time chain; `looked_up` and `hits` count outcomes by how
    many chain tokens they accepted. `turnaround_ms` is the median of hits, None without any.
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
        """Drafted tokens that held; None without any, as the following."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds and sum(self.drafted) else None

    @property
    def hit_rate(self) -> float | None:
        return sum(self.hits) / sum(self.looked_up) if sum(self.looked_up) else None


@dataclass(frozen=True, slots=True)
class Judged:
    """A round as measured and as the formula has it, milliseconds; rates in tokens per second.

    `verify_ms` and `verify_alone_ms` are the mean verify in the run and what the same verifies take alone; `between_ms`
    and `between_alone_ms` the target's wait before them.
    """

    measured: float
    predicted: float
    verify_ms: float
    verify_alone_ms: float
    between_ms: float
    between_alone_ms: float

    @property
    def share(self) -> float:
        """Measured over predicted: 1 is all that the formula promises."""
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


def judge_plain(found: Summary, alone: Alone) -> Judged:
    """Plain decoding: one run-ahead token after another, nothing between them."""
    step_ms = found.decode_ms / found.rounds
    return Judged(_rate(found), 1000 * ar_rate(alone.costs()), step_ms, alone.step_ms, 0.0, 0.0)


def judge(found: Summary, alone: Alone, depth: int, works_ahead: bool) -> Judged:
    """SD with this K, or with `works_ahead` SSD, against theorem 7 on the run's own mix of rounds."""
    costs = alone.costs(found.turnaround_ms)
    kinds = kinds_of(found, depth, works_ahead)
    verify_alone_ms = sum(kind.share * alone.verify_ms(kind.rows) for kind in kinds)
    predicted = mixed_rate(costs, kinds)
    return Judged(
        _rate(found),
        1000 * predicted,
        found.verify_ms / found.rounds,
        verify_alone_ms,
        found.idle_ms / found.rounds,
        _tokens(found) / predicted - verify_alone_ms,
    )


def kinds_of(found: Summary, depth: int, works_ahead: bool) -> list[Kind]:
    """The run's rounds by the rows they verified. A chain asked for counts as one of mean length; one from the cache
    must have been drafted as deep during the verify before it. Chains longer than K are the n-grams', which cost
    nothing."""
    chains = sum(found.rows[2:])
    drafted = sum(count * min(rows - 1, depth) for rows, count in enumerate(found.rows) if rows > 1)
    mean = round(drafted / chains) if chains else 0
    asked = min(found.asked / found.rounds, 1.0)
    kinds = []
    for rows, count in enumerate(found.rows):
        share = count / found.rounds
        ahead = rows - 1 if works_ahead and rows <= depth + 1 else 0
        kinds.append(Kind(share * asked, rows, _tokens(found), asked=mean))
        kinds.append(Kind(share * (1.0 - asked), rows, _tokens(found), ahead=ahead))
    return [kind for kind in kinds if kind.share > 0]


def times_of_drafting(costs: Costs, depth: int) -> tuple[float, float]:
    """T_p and T_SD: the work ahead, and a just-in-time chain, in units of the verify."""
    verify_ms = costs.verify_ms(depth + 1)
    return costs.tree_ms(depth) / verify_ms, costs.chain_ms(depth) / verify_ms


def _tokens(found: Summary) -> float:
    return found.tokens / found.rounds


def _rate(found: Summary) -> float:
    return 1000 * found.tokens / found.decode_ms


def _sum(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max((len(c) for c in counts), default=0)
    return tuple(sum(c[i] for c in counts if i < len(c)) for i in range(longest))
