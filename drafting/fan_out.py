"""Which outcomes to prepare: how many bonus candidates at each number of accepted tokens, under a budget of branches.

Paper section 4 (fan-out). A policy returns F_k for k = 0..chain_length; it is told what the drafter thinks at each fork
point, None where that is not known yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

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
    """The likeliest (k, rank) pairs first, by live estimates of P(k) * P(rank | k) given how sure the drafter is."""
    reach = 1.0
    heap: list[tuple[float, int, int, float]] = []
    for k, point in enumerate(points):
        full = k == len(points) - 1
        holds = 0.0 if full else calibration.acceptance(k, point.own_gap if point else None)
        stops_here = reach * (1.0 - holds)
        if point is None or point.gaps:  # filters may leave nothing but the chain's own token
            heapq.heappush(heap, (-stops_here * calibration.bonus_share(full, 0, point), k, 0, stops_here))
        reach *= holds
    counts = [0] * len(points)
    while heap and sum(counts) < budget:
        _, k, rank, stops_here = heapq.heappop(heap)
        counts[k] += 1
        point, full = points[k], k == len(points) - 1
        if point is None or rank + 1 < len(point.gaps):
            share = calibration.bonus_share(full, rank + 1, point)
            heapq.heappush(heap, (-stops_here * share, k, rank + 1, stops_here))
    return counts


POLICIES: dict[str, FanOut] = {"best-first": best_first, "geometric": geometric, "uniform": uniform}
