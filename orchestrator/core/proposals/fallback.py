"""What to verify after a miss, and whether a hit should wait to grow: expected tokens minus the worth of the time.

A millisecond is worth the tokens it has lately brought: of the target's, what all requests brought, of a request's
waiting, its own. Pure functions of the estimates: no clock, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.proposals.copies import Tail


@dataclass(frozen=True, slots=True)
class Stopgap:
    """Verify what can be copied now (nothing: an AR step), or ask the drafter for `wait_for` tokens first, or let the
    target's own draft `own`. `value`: the tokens that brings less the worth of its time."""

    wait_for: int = 0
    value: float = 0.0
    own: int = 0


def after_miss(estimates: Estimates, tail: Tail, longest: int, has_drafter: bool, own: str = "") -> Stopgap:
    """The best of: an AR step, what is worth copying, the drafter's just-in-time chain of any length, a chain of the
    target's `own` drafter, if it has one for this."""
    best = Stopgap(value=_alone(estimates, tail))
    for length in range(1, longest + 1 if own else 1):
        value = _of_own(estimates, length, own)
        if value > best.value:
            best = Stopgap(own=length, value=value)
    for length in range(1, longest + 1 if has_drafter else 1):
        value = _asked(estimates, length)
        if value > best.value:
            best = Stopgap(wait_for=length, value=value)
    return best


def worth_hoping(estimates: Estimates, alternative: Stopgap, longest: int, wait_ms: float) -> bool:
    """Whether an outcome whose branches are still on their way should wait `wait_ms` for them, as likely a hit as any.

    Without this a branch that comes a moment after its outcome is lost, and with a slow drafter or a long way to it
    those are the branches of full acceptance, round after round.
    """
    hit = max(
        estimates.drafted.expected_tokens(depth)
        - estimates.tokens_per_ms() * estimates.verify_ms(depth + 1)
        - estimates.own_tokens_per_ms() * (depth - 1) * estimates.depth_ms()
        for depth in range(1, longest + 1)
    )
    waiting = estimates.own_tokens_per_ms() * estimates.wait_ms(wait_ms)
    return estimates.hit_rate() * (hit - alternative.value) > waiting


def drafts_better(estimates: Estimates, tail: Tail, longest: int, drafter: str = "") -> bool:
    """Whether a drafter's chain of `longest` is worth asking for when this can be copied for nothing (SD)."""
    return not tail.tokens or _asked(estimates, longest, drafter) > _alone(estimates, tail)


def worth_waiting(estimates: Estimates, depth: int, longest: int, since_last_ms: float) -> bool:
    """Whether a hit of `depth` tokens should wait for one more, the last having come `since_last_ms` ago."""
    if depth >= longest:
        return False
    waiting = estimates.own_tokens_per_ms() * estimates.wait_ms(max(estimates.depth_ms() - since_last_ms, 0.0))
    row = estimates.tokens_per_ms() * (estimates.verify_ms(depth + 2) - estimates.verify_ms(depth + 1))
    return estimates.drafted.reach(depth) > waiting + row


def _alone(estimates: Estimates, tail: Tail) -> float:
    """What a step brings, with what can be copied behind it, less the worth of its forward."""
    return 1.0 - estimates.tokens_per_ms() * estimates.verify_ms(1) + tail.gain


def _asked(estimates: Estimates, length: int, drafter: str = "") -> float:
    """What a chain that is asked for brings, less the worth of its forward and of the wait."""
    forward = estimates.tokens_per_ms() * estimates.verify_ms(length + 1)
    waiting = estimates.own_tokens_per_ms() * estimates.wait_ms(estimates.draft_ms(length, drafter))
    return estimates.holding(drafter).expected_tokens(length) - forward - waiting


def _of_own(estimates: Estimates, length: int, own: str) -> float:
    """What a chain of the target's own drafter brings, less the worth of its forward and its drafting; and of the next
    chain's, which nobody has prepared for where this one holds, for nobody else knows it."""
    drafting = estimates.tokens_per_ms() * estimates.own_ms(length, own)
    forward = estimates.tokens_per_ms() * estimates.verify_ms(length + 1)
    holding = estimates.holding(own)
    next_time = estimates.hit_rate() * holding.reach(0) * drafting
    return holding.expected_tokens(length) - forward - drafting - next_time


def longest_wait_ms(expected_ms: float) -> float:
    """Any wait for a drafter is bounded: three times what it should take, then the target goes on alone."""
    return 3.0 * expected_ms + 1.0
