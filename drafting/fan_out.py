"""Which outcomes to prepare: how many bonus candidates at each number of accepted tokens, under a budget of branches.

Paper section 4 (fan-out). A policy returns F_k for k = 0..chain_length; it is told what the drafter thinks at each fork
point, None where that is not known yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.drafting.calibration import Calibration, Point

FanOut = Callable[[Sequence[Point | None], int, Calibration], list[int]]

# Theorem 12's exponent r of 1 - p_hit(F) = F^-r; the paper shows straight lines near this slope.
POWER_LAW_EXPONENT = 1.0


def uniform(points: Sequence[Point | None], budget: int, calibration: Calibration) -> list[int]:
    """The same everywhere; what does not divide goes to the longest acceptances."""
    counts = [budget // len(points)] * len(points)
    for index in range(budget % len(points)):
        counts[len(points) - 1 - index] += 1
    return counts


def geometric(points: Sequence[Point | None], budget: int, calibration: Calibration) -> list[int]:
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


def best_first(points: Sequence[Point | None], budget: int, calibration: Calibration) -> list[int]:
    """The likeliest (k, rank) pairs first."""
    counts = [0] * len(points)
    for _, k in islice(ranked(points, calibration), budget):
        counts[k] += 1
    return counts


def ranked(points: Sequence[Point | None], calibration: Calibration) -> Iterator[tuple[float, int]]:
    """Every branch there may be, likeliest first: its probability, and after how many accepted tokens it begins.

    By live estimates of P(k) * P(rank | k) given how sure the drafter is.
    """
    reach = 1.0
    heap: list[tuple[float, int, int, float]] = []
    for k, point in enumerate(points):
        full = k == len(points) - 1
        holds = 0.0 if full else calibration.acceptance(k, point.own_gap if point else None)
        stops_here = reach * (1.0 - holds)
        if point is None or point.gaps:  # filters may leave nothing but the chain's own token
            heapq.heappush(heap, (-stops_here * calibration.bonus_share(full, 0, point), k, 0, stops_here))
        reach *= holds
    while heap:
        gain, k, rank, stops_here = heapq.heappop(heap)
        yield -gain, k
        point, full = points[k], k == len(points) - 1
        if point is None or rank + 1 < len(point.gaps):
            share = calibration.bonus_share(full, rank + 1, point)
            heapq.heappush(heap, (-stops_here * share, k, rank + 1, stops_here))


@dataclass(frozen=True, slots=True)
class Wish:
    """A request's: `branches` outcomes to be prepared for, `depth` deep, at these fork points (None: not known yet).

    The `skip` likeliest are other drafters'.
    """

    points: Sequence[Point | None]
    branches: int
    depth: int
    skip: int = 0


def ranks(wish: Wish, branches: int, policy: FanOut, calibration: Calibration) -> list[range]:
    """Which bonus candidates to prepare for at each fork point: `branches` of them, those a policy would add to the
    `skip` likeliest."""
    until = policy(wish.points, wish.skip + branches, calibration)
    since = policy(wish.points, wish.skip, calibration) if wish.skip else [0] * len(until)
    return [range(first, last) for first, last in zip(since, until, strict=True)]


def shares(wishes: Sequence[Wish], budget: int | None, calibration: Calibration) -> list[int]:
    """How many branches each request gets, of `budget` in all: those most likely needed, whosever they are.

    Nobody gets more than the wish, nobody that wishes for any gets none. A budget of None grants every wish.
    """
    if budget is None or sum(wish.branches for wish in wishes) <= budget:
        return [wish.branches for wish in wishes]
    counts = [min(wish.branches, 1) for wish in wishes]
    others = (_by(index, wish, calibration) for index, wish in enumerate(wishes))
    for _, index in islice(heapq.merge(*others), max(budget - sum(counts), 0)):
        counts[index] += 1
    return counts


def _by(index: int, wish: Wish, calibration: Calibration) -> Iterator[tuple[float, int]]:
    """One request's branches but its first as `heapq.merge` takes them: the least number first."""
    for gain, _ in islice(ranked(wish.points, calibration), wish.skip + 1, wish.skip + wish.branches):
        yield -gain, index


POLICIES: dict[str, FanOut] = {"best-first": best_first, "geometric": geometric, "uniform": uniform}
