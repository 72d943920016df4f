"""Forecasts from a probe: tokens per second of AR, SD and SSD by K and B, and what limits each.

AR and SD use isolated times; SSD uses the verify beside a working drafter, because both share memory bandwidth. The
formula is `orchestrator.core.policy.forecasts`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from outrider.bench.timing.loops import costs
from outrider.bench.timing.probe import WORTH_IT, Probe, Rehearsal
from outrider.orchestrator.core.policy.forecasts import Costs, Odds, ceiling, sd_rate, ssd_rate

# Limits of contradictions, far from what an idle machine shows: one token costs about the same however it is decoded,
# a verify is not cheaper for more tokens, nor faster beside other work.
UNLIKE, DEARER_ALONE, QUICKER_BESIDE = 2.0, 1.5, 0.75
WAITED = 0.2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second of a mode at its K and B; `limit` describes what bounds it."""

    mode: str
    depth: int
    branches: int
    tokens_per_second: float
    limit: str


def forecasts(probe: Probe, turnaround_ms: float) -> list[Forecast]:
    """Returns all modes and settings that were probed, the fastest first."""
    found = [Forecast("ar", 0, 0, 1000 / probe.step_ms, f"one token a forward, {probe.step_ms:.1f} ms each")]
    for rehearsal in probe.rehearsals:
        sd = sd_rate(costs_in_turn(probe), Odds(_always(rehearsal.tokens_in_full), 0.0), rehearsal.depth)
        found.append(Forecast("sd", rehearsal.depth, 0, 1000 * sd, _sd_limit(probe, rehearsal)))
        beside = costs_beside(probe, rehearsal, turnaround_ms)
        ssd = ssd_rate(beside, Odds(_always(rehearsal.tokens), rehearsal.hit_rate), rehearsal.depth)
        found.append(Forecast("ssd", rehearsal.depth, rehearsal.branches, 1000 * ssd, _ssd_limit(probe, rehearsal)))
    return sorted(found, key=lambda forecast: -forecast.tokens_per_second)


def best_of(found: list[Forecast], mode: str) -> Forecast | None:
    return next((forecast for forecast in found if forecast.mode == mode), None)


def recommendation(found: list[Forecast]) -> Forecast:
    """Returns the fastest, or plain decoding if the gain is less than `WORTH_IT`."""
    plain = best_of(found, "ar") or found[0]
    return found[0] if found[0].tokens_per_second > WORTH_IT * plain.tokens_per_second else plain


def costs_in_turn(probe: Probe) -> Costs:
    """SD's costs: everything in a round except the verify belongs to the chain."""

    def chain_ms(depth: int) -> float:
        return max(probe.turn_ms(depth) - probe.verify_ms(depth + 1), 0.0)

    return costs(probe.step_ms, probe.verify_ms, chain_ms)


def costs_beside(probe: Probe, rehearsal: Rehearsal, turnaround_ms: float) -> Costs:
    """SSD's costs with this rehearsal's K and B: verifies beside the drafter.

    Branches are used as deep as they are, and the rehearsal's tokens reflect that, so no tree is waited for. A chain on
    request after a miss has SD's wait, and starts after half a depth on average.
    """
    usual_ms, slower = statistics.fmean(tried.verify_ms for tried in rehearsal.rounds), slowdown(probe, rehearsal)

    def verify_ms(rows: int) -> float:
        return usual_ms if rows == rehearsal.depth + 1 else slower * probe.verify_ms(rows)

    def chain_ms(depth: int) -> float:
        return probe.chain_ms(depth) + probe.link_ms + probe.tree_ms(rehearsal.branches) / 2

    return costs(probe.step_ms, verify_ms, chain_ms, between_ms=probe.between_ms, turnaround_ms=turnaround_ms)


def slowdown(probe: Probe, rehearsal: Rehearsal) -> float:
    """Returns how much longer a verify takes beside the drafter."""
    return statistics.median(tried.verify_ms / probe.verify_ms(tried.rows) for tried in rehearsal.rounds)


def doubts(probe: Probe, waited: float) -> list[str]:
    """Returns contradictions between measurements, which show that the machine was busy; each is a clause.

    `waited`: the share of its runnable time in which the target had no CPU.
    """
    one, plain = probe.verify_ms(1), probe.plain_ms
    larger, cheapest = min(probe.verify_ms.points[1:], key=lambda point: point[1])
    found = []
    if waited > WAITED:
        found.append(f"the target waited for a CPU for {waited:.0%} of its time")
    if max(one, plain) > UNLIKE * min(one, plain):
        found.append(f"a verify of one token took {one:.1f} ms and a token of plain decoding {plain:.1f} ms")
    if one > DEARER_ALONE * cheapest:
        found.append(f"a verify of one token took {one:.1f} ms and one of {larger} tokens {cheapest:.1f} ms")
    quickest = min(slowdown(probe, rehearsal) for rehearsal in probe.rehearsals)
    if quickest < QUICKER_BESIDE:
        found.append(f"a verify beside the drafter took {quickest:.2f} times what it takes alone")
    return found


def most_gained(probe: Probe, depth: int) -> float:
    """1 + T_SD for this pair."""
    return ceiling(costs_in_turn(probe), depth)


def _always(value: float) -> Callable[[int], float]:
    return lambda depth: value


def _sd_limit(probe: Probe, rehearsal: Rehearsal) -> str:
    verify, chain = probe.verify_ms(rehearsal.depth + 1), costs_in_turn(probe).chain_ms(rehearsal.depth)
    return f"{rehearsal.tokens_in_full:.2f} tokens for verify {verify:.1f} + draft {chain:.1f} ms"


def _ssd_limit(probe: Probe, rehearsal: Rehearsal) -> str:
    verify = statistics.fmean(tried.verify_ms for tried in rehearsal.rounds)
    tree = (rehearsal.depth + 1) * probe.tree_ms(rehearsal.branches)
    hidden = "the drafting hides" if tree <= verify else f"the drafter needs {tree:.1f} ms"
    return (
        f"{rehearsal.tokens:.2f} tokens a round, {rehearsal.hit_rate:.0%} hits; verify beside the drafter {verify:.1f}"
        f" ms, {slowdown(probe, rehearsal):.2f} times what it takes alone; {hidden}"
    )
