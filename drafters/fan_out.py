"""The fan-out: chooses the outcomes to prepare, by the outcomes of past rounds. Paper, section 4.

A policy (`FanOut`) divides a budget of branches among the numbers of accepted tokens: it returns F_k for k =
0..chain_length, from the drafter's scores at each fork point (None: not known yet).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from outrider.protocol.trees import Candidate

MAX_RANK = 8
SAMPLE_DECAY = 0.998
# The probability of each rank from `MAX_RANK` on, relative to the rank before it.
TAIL_RATIO = 0.8

# Edges of the gap buckets, in nats. On the tiny pair acceptance changes by about ten points from one to the
# next. Below 0 the chain's token is not the drafter's best: it was copied from the text, or is another drafter's.
GAP_EDGES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)

# The prior weighs as much as this many rounds (measured on a typical pair, docs/log/2026-11.md).
PRIOR_WEIGHT_ROUNDS = 4.0

# Theorem 12's exponent r of 1 - p_hit(F) = F^-r; the paper shows straight lines near this slope.
POWER_LAW_EXPONENT = 1.0


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A fork point: the drafter's scores after k accepted tokens.

    `own_gap` is how far the chain's next token scores above the best other token; None after the whole chain. `others`
    are the candidates for the bonus token, best first, and `gaps` how far they score below the drafter's best token.
    """

    own_gap: float | None
    gaps: tuple[float, ...]
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, token: int | None, candidates: Sequence[Candidate], eos: Collection[int] = ()) -> ForkPoint:
        """Returns the point before the chain's `token` (None after its end), given the `candidates` there, best first.
        End tokens are no candidates for a bonus token."""
        others = [candidate for candidate in candidates if candidate.token != token and candidate.token not in eos]
        gaps, own_gap = tuple(candidate.gap for candidate in others), None
        if token is not None:
            best, worst = (gaps[0], gaps[-1]) if gaps else (math.inf, math.inf)
            own_gap = best - next((candidate.gap for candidate in candidates if candidate.token == token), worst)
        return cls(own_gap, gaps, tuple(candidate.token for candidate in others))

    def gap_to_first(self, rank: int) -> float:
        """Returns how far candidate `rank` is below the first candidate."""
        return self.gaps[rank] - self.gaps[0]


class Share:
    """The rate of an event, beginning with a prior; old samples lose weight."""

    def __init__(self, prior: float) -> None:
        self._happened = PRIOR_WEIGHT_ROUNDS * prior
        self._tried = PRIOR_WEIGHT_ROUNDS

    def add(self, happened: bool) -> None:
        self._happened = self._happened * SAMPLE_DECAY + happened
        self._tried = self._tried * SAMPLE_DECAY + 1.0

    @property
    def value(self) -> float:
        return self._happened / self._tried


class Calibration:
    """Estimates of acceptance for the fan-out, updated by each outcome; old rounds lose weight.

    Counts how often a chain token is accepted, and the rank of the bonus token among the candidates. Both depend on how
    sure the drafter is, so both are counted by *gap*: how far the chosen token's score is above the next one, or a
    candidate's below the first.
    """

    def __init__(self) -> None:
        middles = [0.0, *((a + b) / 2 for a, b in pairwise(GAP_EDGES)), 12.0]
        self._accepted = [Share(1.0 - 0.6 * math.exp(-gap / 1.5)) for gap in middles]
        self._by_position = defaultdict[int, Share](lambda: Share(0.75))
        self._by_gap = {
            full: [[Share(_prior_rate(full, rank, gap)) for gap in middles] for rank in range(MAX_RANK)]
            for full in (False, True)
        }
        self._by_rank = {
            full: [Share(_prior_rate(full, rank, 0.5 + 0.5 * rank)) for rank in range(MAX_RANK)]
            for full in (False, True)
        }

    def learn(self, points: Sequence[ForkPoint], chain_length: int, accepted: int, rank: int | None) -> None:
        """Counts an outcome: `accepted` of `chain_length` tokens, and the bonus token's `rank` among the candidates
        there (None: not among them).

        `points` are those of 0..accepted; the last may be missing if the drafter did not score it.
        """
        for position in range(min(accepted + 1, chain_length)):
            gap = points[position].own_gap
            self._by_position[position].add(position < accepted)
            if gap is not None:
                self._accepted[bisect(GAP_EDGES, gap)].add(position < accepted)
        if accepted == len(points):
            return
        full, point = accepted == chain_length, points[accepted]
        if full and len(point.gaps) > 1:  # the drafter's next token, which may have been left out as unlikely
            self._accepted[bisect(GAP_EDGES, point.gap_to_first(1))].add(rank == 0)
        for candidate in range(min(len(point.gaps), MAX_RANK)):
            self._by_rank[full][candidate].add(candidate == rank)
            bucket = bisect(GAP_EDGES, point.gap_to_first(candidate))
            self._by_gap[full][candidate][bucket].add(candidate == rank)

    def acceptance(self, position: int, gap: float | None = None) -> float:
        """Returns the probability that chain token `position` is accepted if all before it are; by its gap if known."""
        if gap is not None:
            return self._accepted[bisect(GAP_EDGES, gap)].value
        return self._by_position[position].value

    def bonus_probability(self, full: bool, rank: int, point: ForkPoint | None = None) -> float:
        """Returns the probability that the bonus token is candidate `rank`, not counting the chain's own token."""
        known = min(rank, MAX_RANK - 1)
        by_gap = self._by_gap[full][known]
        share = by_gap[bisect(GAP_EDGES, point.gap_to_first(rank))] if point is not None else self._by_rank[full][known]
        return share.value * TAIL_RATIO ** (rank - known)


def _prior_rate(full: bool, rank: int, gap: float) -> float:
    first = 0.8 if full else 0.5
    return first if rank == 0 else 0.4 * math.exp(-gap) / rank


FanOut = Callable[[Sequence[ForkPoint | None], int, Calibration], list[int]]


def uniform(points: Sequence[ForkPoint | None], budget: int, calibration: Calibration) -> list[int]:
    """Gives each k the same number of branches, and the remainder to the largest k."""
    each, rest = divmod(budget, len(points))
    return [each] * (len(points) - rest) + [each + 1] * rest


def geometric(points: Sequence[ForkPoint | None], budget: int, calibration: Calibration) -> list[int]:
    """Theorem 12: F_k proportional to a^(k/(1+r)), the last one lifted by (1-a)^(-1/(1+r)).

    Whole numbers by largest remainder, so that the counts add up to the budget.
    """
    rates = [calibration.acceptance(position) for position in range(len(points) - 1)]
    rate = min(max(sum(rates) / len(rates) if rates else 0.5, 0.05), 0.98)
    power = 1.0 / (1.0 + POWER_LAW_EXPONENT)
    weights = [rate ** (k * power) for k in range(len(points))]
    weights[-1] *= (1.0 - rate) ** -power
    shares = [budget * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return counts


def best_first(points: Sequence[ForkPoint | None], budget: int, calibration: Calibration) -> list[int]:
    """Gives branches to the likeliest (k, rank) pairs."""
    counts = [0] * len(points)
    for _, k in islice(rank_branches(points, calibration), budget):
        counts[k] += 1
    return counts


def rank_branches(points: Sequence[ForkPoint | None], calibration: Calibration) -> Iterator[tuple[float, int]]:
    """Yields (probability, k) for every possible branch, likeliest first; a branch begins after k accepted tokens.

    The probability is P(k) * P(rank | k), estimated by `calibration` from the gaps.
    """
    heap: list[tuple[float, int, int]] = []
    stop_probs = stop_probabilities(points, calibration)

    def add(k: int, rank: int) -> None:
        point = points[k]
        if point is None or rank < len(point.gaps):  # filters may leave nothing but the chain's own token
            share = calibration.bonus_probability(k == len(points) - 1, rank, point)
            heapq.heappush(heap, (-stop_probs[k] * share, k, rank))

    for k in range(len(points)):
        add(k, 0)
    while heap:
        gain, k, rank = heapq.heappop(heap)
        yield -gain, k
        add(k, rank + 1)


def stop_probabilities(points: Sequence[ForkPoint | None], calibration: Calibration) -> list[float]:
    """Returns for each k the probability that exactly k tokens of the chain are accepted."""
    reach, found = 1.0, []
    for k, point in enumerate(points):
        full = k == len(points) - 1
        rate = 0.0 if full else calibration.acceptance(k, point.own_gap if point else None)
        found.append(reach * (1.0 - rate))
        reach *= rate
    return found


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """A request for `branches` of `depth` tokens at these fork points (None: not known yet).

    The `rank_offset` likeliest outcomes belong to other drafters.
    """

    points: Sequence[ForkPoint | None]
    branches: int
    depth: int
    rank_offset: int = 0


def divide_branches(demands: Sequence[BranchRequest], budget: int | None, calibration: Calibration) -> list[int]:
    """Divides `budget` branches among the requests by the probability that each branch is needed.

    A request gets at most as many as it wants, and at least one if it wants any. A budget of None grants all.
    """
    if budget is None or sum(demand.branches for demand in demands) <= budget:
        return [demand.branches for demand in demands]
    counts = [min(demand.branches, 1) for demand in demands]
    others = (_branches_by_gain(index, demand, calibration) for index, demand in enumerate(demands))
    for _, index in islice(heapq.merge(*others), max(budget - sum(counts), 0)):
        counts[index] += 1
    return counts


def _branches_by_gain(index: int, demand: BranchRequest, calibration: Calibration) -> Iterator[tuple[float, int]]:
    """Yields the request's branches except its first, as `heapq.merge` needs them: in ascending order."""
    for gain, _ in islice(
        rank_branches(demand.points, calibration), demand.rank_offset + 1, demand.rank_offset + demand.branches
    ):
        yield -gain, index


FAN_OUT_POLICIES: dict[str, FanOut] = {"best-first": best_first, "geometric": geometric, "uniform": uniform}
