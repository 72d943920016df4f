"""Which outcomes to prepare: how many bonus candidates at each number of accepted tokens, under a budget of branches.

Paper section 4 (fan-out). `counts[k]` is F_k for k = 0..chain_length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from draft_worker.calibration import Calibration

FanOut = Callable[[int, int, Calibration], list[int]]

# Theorem 12's exponent r of 1 - p_hit(F) = F^-r; the paper shows straight lines near this slope.
POWER_LAW_EXPONENT = 1.0


def uniform(chain_length: int, budget: int, calibration: Calibration) -> list[int]:
    """The same everywhere; what does not divide goes to the longest acceptances."""
    points = chain_length + 1
    counts = [budget // points] * points
    for index in range(budget % points):
        counts[points - 1 - index] += 1
    return counts


def geometric(chain_length: int, budget: int, calibration: Calibration) -> list[int]:
    """Theorem 12: F_k proportional to a^(k/(1+r)), the last one lifted by (1-a)^(-1/(1+r)).

    Whole numbers by largest remainder, so that the counts add up to the budget.
    """
    rates = [calibration.acceptance(position) for position in range(chain_length)]
    rate = min(max(sum(rates) / len(rates) if rates else 0.5, 0.05), 0.98)
    power = 1.0 / (1.0 + POWER_LAW_EXPONENT)
    weights = [rate ** (k * power) for k in range(chain_length + 1)]
    weights[-1] *= (1.0 - rate) ** -power
    shares = [budget * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return counts


def best_first(chain_length: int, budget: int, calibration: Calibration) -> list[int]:
    """The likeliest (k, rank) pairs first, by live estimates of P(k) * P(rank | k)."""
    reach = 1.0
    heap: list[tuple[float, int, int, float]] = []
    for k in range(chain_length + 1):
        stops_here = reach if k == chain_length else reach * (1.0 - calibration.acceptance(k))
        full = k == chain_length
        heapq.heappush(heap, (-stops_here * calibration.rank_share(full, 0), k, 0, stops_here))
        if not full:
            reach *= calibration.acceptance(k)
    counts = [0] * (chain_length + 1)
    for _ in range(budget):
        _, k, rank, stops_here = heapq.heappop(heap)
        counts[k] += 1
        share = calibration.rank_share(k == chain_length, rank + 1)
        heapq.heappush(heap, (-stops_here * share, k, rank + 1, stops_here))
    return counts


POLICIES: dict[str, FanOut] = {"best-first": best_first, "geometric": geometric, "uniform": uniform}
