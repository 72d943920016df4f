"""What a probe promises: tokens per second of AR, SD and SSD by K and B, what limits each, and what to do about it.

The formula is `orchestrator.core.speedup`'s; all inputs are times measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.speedup import Costs, Odds, ceiling, sd_rate, ssd_rate
from orchestrator.study.probe import Probe, Trial

# Gains below this are not worth another process: the recommendation stays with plain decoding.
WORTH_IT = 1.03


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second of one mode at its K and B. `limit` says what bounds it."""

    mode: str
    depth: int
    branches: int
    tokens_per_second: float
    limit: str


def forecasts(probe: Probe, turnaround_ms: float) -> list[Forecast]:
    """All modes and settings the probe tried, the fastest first."""
    found = [Forecast("ar", 0, 0, 1000 / probe.step_ms, f"one token a forward, {probe.step_ms:.1f} ms each")]
    for trial in probe.trials:
        costs, odds = costs_of(probe, trial.branches, turnaround_ms), odds_of(trial)
        sd, ssd = sd_rate(costs, odds, trial.depth), ssd_rate(costs, odds, trial.depth)
        found.append(Forecast("sd", trial.depth, 0, 1000 * sd, _sd_limit(costs, odds, trial.depth)))
        found.append(Forecast("ssd", trial.depth, trial.branches, 1000 * ssd, _ssd_limit(costs, trial)))
    return sorted(found, key=lambda forecast: -forecast.tokens_per_second)


def best_of(found: list[Forecast], mode: str) -> Forecast | None:
    return next((forecast for forecast in found if forecast.mode == mode), None)


def recommendation(found: list[Forecast]) -> Forecast:
    """The fastest, unless it gains less than `WORTH_IT` on plain decoding."""
    plain = best_of(found, "ar") or found[0]
    return found[0] if found[0].tokens_per_second > WORTH_IT * plain.tokens_per_second else plain


def costs_of(probe: Probe, branches: int, turnaround_ms: float) -> Costs:
    return Costs(
        step_ms=probe.step_ms,
        verify_ms=probe.verify_ms,
        chain_ms=lambda depth: probe.chain_ms(depth) + probe.link_ms,
        tree_ms=lambda depth: (depth + 1) * probe.tree_ms(branches),
        turnaround_ms=turnaround_ms,
    )


def odds_of(trial: Trial) -> Odds:
    return Odds(lambda depth: trial.tokens, trial.hit_rate)


def ar_ceiling(probe: Probe, depth: int, branches: int) -> float:
    """1 + T_SD for this pair."""
    return ceiling(costs_of(probe, branches, 0.0), depth)


def _sd_limit(costs: Costs, odds: Odds, depth: int) -> str:
    verify, chain = costs.verify_ms(depth + 1), costs.chain_ms(depth)
    return f"{odds.tokens(depth):.2f} tokens for verify {verify:.1f} + draft {chain:.1f} ms"


def _ssd_limit(costs: Costs, trial: Trial) -> str:
    verify, tree = costs.verify_ms(trial.depth + 1), costs.tree_ms(trial.depth)
    hidden = "the drafting hides" if tree <= verify else f"the drafter needs {tree:.1f} ms, the verify {verify:.1f}"
    return f"{trial.tokens:.2f} tokens a round, {trial.hit_rate:.0%} hits; {hidden}"
