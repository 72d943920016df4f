"""The formula: tokens per second of AR, SD and SSD from times and probabilities measured one by one.

The paper's theorem 7 with the cost c(M) of verifying M tokens and the turnaround put in. Pure; milliseconds in, tokens
per millisecond out. The controller, `outrider tune` and `outrider bench` all predict with this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Times measured alone. `verify_ms(M)` is c(M); `chain_ms(K)` a just-in-time chain, link included; `tree_ms(K)` the
    work ahead for full depth K; `turnaround_ms` from OUTCOME leaving the target until VERIFY reaches it on a hit."""

    step_ms: float
    verify_ms: Callable[[int], float]
    chain_ms: Callable[[int], float]
    tree_ms: Callable[[int], float]
    turnaround_ms: float


@dataclass(frozen=True, slots=True)
class Odds:
    """How often things succeed: `tokens(K)` is E[tokens] of a round with a chain of K, bonus included; `hit` is p."""

    tokens: Callable[[int], float]
    hit: float


def ar_rate(costs: Costs) -> float:
    return 1.0 / costs.step_ms


def sd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Draft, then verify, in turn: T_SD is `chain_ms(K)` in units of c(K+1)."""
    return odds.tokens(depth) / (costs.verify_ms(depth + 1) + costs.chain_ms(depth) + costs.turnaround_ms)


def ssd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Theorem 7. After a miss the better of an AR step and a just-in-time chain is taken."""
    verify_ms = costs.verify_ms(depth + 1)
    hit_ms = max(verify_ms, costs.tree_ms(depth)) + costs.turnaround_ms
    hit_tokens = odds.tokens(depth)
    jit_ms = verify_ms + costs.chain_ms(depth) + costs.turnaround_ms
    alone_ms = max(costs.verify_ms(1), costs.tree_ms(depth)) + costs.turnaround_ms
    reference = hit_tokens / hit_ms
    jit_is_better = hit_tokens - reference * jit_ms > 1.0 - reference * alone_ms
    miss_tokens, miss_ms = (hit_tokens, jit_ms) if jit_is_better else (1.0, alone_ms)
    p = odds.hit
    return (p * hit_tokens + (1 - p) * miss_tokens) / (p * hit_ms + (1 - p) * miss_ms)


def ceiling(costs: Costs, depth: int) -> float:
    """1 + T_SD: the most that SSD can gain over SD with the same drafter and K."""
    return 1.0 + costs.chain_ms(depth) / costs.verify_ms(depth + 1)
