"""Forecasts the tokens per second of AR, SD and SSD by K and B from a probe, and says what limits each.

AR and SD use times in isolation. SSD uses the verify time while the drafter works, because both share memory bandwidth.
The formula is in `orchestrator.core.policy.forecasts`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from outrider.bench.timing.loops import costs
from outrider.bench.timing.probe import WORTH_IT, Probe, Rehearsal
from outrider.orchestrator.core.policy.forecasts import Costs, Odds, ceiling, sd_rate, ssd_rate

# Limits that an idle machine keeps by far: one token takes about the same time by verify and by plain decoding, and a
# verify is not faster with more tokens, nor while the drafter works. WAITED: the share of time without a CPU.
MOST_UNEQUAL, MOST_FOR_ONE_TOKEN, LEAST_SLOWDOWN, WAITED = 2.0, 1.5, 0.75, 0.2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second of a mode at its K and B; `limit` describes what bounds them."""

    mode: str
    depth: int
    branches: int
    tokens_per_second: float
    limit: str


def forecasts(probe: Probe, turnaround_ms: float) -> list[Forecast]:
    """Returns forecasts of all modes and settings that were probed, fastest first."""
    found = [Forecast("ar", 0, 0, 1000 / probe.step_ms, f"one token per forward of {probe.step_ms:.1f} ms")]
    for rehearsal in probe.rehearsals:
        sd = sd_rate(costs_in_turn(probe), Odds(_always(rehearsal.tokens_in_full), 0.0), rehearsal.depth)
        found.append(Forecast("sd", rehearsal.depth, 0, 1000 * sd, _sd_limit(probe, rehearsal)))
        parallel = costs_in_parallel(probe, rehearsal, turnaround_ms)
        ssd = ssd_rate(parallel, Odds(_always(rehearsal.tokens), rehearsal.hit_rate), rehearsal.depth)
        found.append(Forecast("ssd", rehearsal.depth, rehearsal.branches, 1000 * ssd, _ssd_limit(probe, rehearsal)))
    return sorted(found, key=lambda forecast: -forecast.tokens_per_second)


def best_of(found: list[Forecast], mode: str) -> Forecast | None:
    return next((forecast for forecast in found if forecast.mode == mode), None)


def recommendation(found: list[Forecast]) -> Forecast:
    """Returns the fastest forecast, or plain decoding if the gain is less than `WORTH_IT`."""
    plain = best_of(found, "ar") or found[0]
    return found[0] if found[0].tokens_per_second > WORTH_IT * plain.tokens_per_second else plain


def costs_in_turn(probe: Probe) -> Costs:
    """Returns SD's costs. The chain's cost is the whole round except the verify."""

    def chain_ms(depth: int) -> float:
        return max(probe.turn_ms(depth) - probe.verify_ms(depth + 1), 0.0)

    return costs(probe.step_ms, probe.verify_ms, chain_ms)


def costs_in_parallel(probe: Probe, rehearsal: Rehearsal, turnaround_ms: float) -> Costs:
    """Returns SSD's costs with this rehearsal's K and B: verifies take longer while the drafter works.

    No round waits for a tree: branches are used as deep as they are, which the rehearsal's tokens include. A chain on
    request after a miss has SD's wait, and starts after half a drafter step on average.
    """
    usual_ms, slower = statistics.fmean(tried.verify_ms for tried in rehearsal.rounds), slowdown(probe, rehearsal)

    def verify_ms(rows: int) -> float:
        return usual_ms if rows == rehearsal.depth + 1 else slower * probe.verify_ms(rows)

    def chain_ms(depth: int) -> float:
        return probe.chain_ms(depth) + probe.link_ms + probe.tree_ms(rehearsal.branches) / 2

    return costs(probe.step_ms, verify_ms, chain_ms, between_ms=probe.between_ms, turnaround_ms=turnaround_ms)


def slowdown(probe: Probe, rehearsal: Rehearsal) -> float:
    """Returns how many times longer a verify takes while the drafter works."""
    return statistics.median(tried.verify_ms / probe.verify_ms(tried.rows) for tried in rehearsal.rounds)


def doubts(probe: Probe, waited: float) -> list[str]:
    """Returns contradictions between measurements as clauses; they show that the machine was busy.

    `waited`: the share of its runnable time in which the target waited for a CPU.
    """
    one, plain = probe.verify_ms(1), probe.plain_ms
    larger, cheapest = min(probe.verify_ms.points[1:], key=lambda point: point[1])
    found = []
    if waited > WAITED:
        found.append(f"the target waited for a CPU for {waited:.0%} of its time")
    if max(one, plain) > MOST_UNEQUAL * min(one, plain):
        found.append(f"a verify of one token took {one:.1f} ms and a token of plain decoding {plain:.1f} ms")
    if one > MOST_FOR_ONE_TOKEN * cheapest:
        found.append(f"a verify of one token took {one:.1f} ms and one of {larger} tokens {cheapest:.1f} ms")
    least = min(slowdown(probe, rehearsal) for rehearsal in probe.rehearsals)
    if least < LEAST_SLOWDOWN:
        found.append(f"a verify took {least:.2f} times as long while the drafter worked as alone")
    return found


def sd_ceiling(probe: Probe, depth: int) -> float:
    """Returns 1 + T_SD, the upper bound of SSD over SD for this pair."""
    return ceiling(costs_in_turn(probe), depth)


def _always(value: float) -> Callable[[int], float]:
    return lambda depth: value


def _sd_limit(probe: Probe, rehearsal: Rehearsal) -> str:
    verify, chain = probe.verify_ms(rehearsal.depth + 1), costs_in_turn(probe).chain_ms(rehearsal.depth)
    return f"{rehearsal.tokens_in_full:.2f} tokens per round; verify {verify:.1f} + draft {chain:.1f} ms"


def _ssd_limit(probe: Probe, rehearsal: Rehearsal) -> str:
    verify = statistics.fmean(tried.verify_ms for tried in rehearsal.rounds)
    tree = (rehearsal.depth + 1) * probe.tree_ms(rehearsal.branches)
    hidden = "drafting is hidden" if tree <= verify else f"drafting takes {tree:.1f} ms"
    return (
        f"{rehearsal.tokens:.2f} tokens per round, hit rate {rehearsal.hit_rate:.0%}; verify while drafting"
        f" {verify:.1f} ms, {slowdown(probe, rehearsal):.2f} times that alone; {hidden}"
    )
