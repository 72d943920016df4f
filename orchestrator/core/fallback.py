"""What to verify after a miss, and whether a hit should wait to grow: expected tokens minus the worth of the time.

A millisecond is worth the tokens it has lately brought. Pure functions of the estimates: no clock, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.orchestrator.core.copies import Tail
from outrider.orchestrator.core.estimates import Estimates


@dataclass(frozen=True, slots=True)
class Stopgap:
    """Verify what can be copied now (nothing: an AR step), or ask the drafter for `wait_for` tokens first. `value`: the
    tokens that brings less the worth of its time."""

    wait_for: int = 0
    value: float = 0.0


def after_miss(estimates: Estimates, tail: Tail, longest: int, has_drafter: bool) -> Stopgap:
    """The best of: an AR step, what is worth copying, the drafter's just-in-time chain of any length."""
    rate = estimates.tokens_per_ms()
    best = Stopgap(value=1.0 - rate * estimates.verify_ms(1) + tail.gain)
    for length in range(1, longest + 1 if has_drafter else 1):
        cost = estimates.verify_ms(length + 1) + estimates.draft_ms(length)
        value = estimates.drafted.expected_tokens(length) - rate * cost
        if value > best.value:
            best = Stopgap(wait_for=length, value=value)
    return best


def worth_hoping(estimates: Estimates, alternative: Stopgap, longest: int, wait_ms: float) -> bool:
    """Whether an outcome whose branches are still on their way should wait `wait_ms` for them, as likely a hit as any.

    Without this a branch that comes a moment after its outcome is lost, and with a slow drafter or a long way to it
    those are the branches of full acceptance, round after round.
    """
    rate = estimates.tokens_per_ms()
    hit = max(
        estimates.drafted.expected_tokens(depth)
        - rate * (estimates.verify_ms(depth + 1) + (depth - 1) * estimates.depth_ms())
        for depth in range(1, longest + 1)
    )
    return estimates.hit_rate() * (hit - alternative.value) > rate * wait_ms


def drafts_better(estimates: Estimates, tail: Tail, longest: int) -> bool:
    """Whether a drafter's chain of `longest` is worth asking for when this can be copied for nothing (SD)."""
    if not tail.tokens:
        return True
    rate = estimates.tokens_per_ms()
    copied = 1.0 - rate * estimates.verify_ms(1) + tail.gain
    cost = estimates.verify_ms(longest + 1) + estimates.draft_ms(longest)
    return estimates.drafted.expected_tokens(longest) - rate * cost > copied


def worth_waiting(estimates: Estimates, depth: int, longest: int, since_last_ms: float) -> bool:
    """Whether a hit of `depth` tokens should wait for one more, the last having come `since_last_ms` ago."""
    if depth >= longest:
        return False
    wait = max(estimates.depth_ms() - since_last_ms, 0.0)
    cost = wait + estimates.verify_ms(depth + 2) - estimates.verify_ms(depth + 1)
    return estimates.drafted.reach(depth) > estimates.tokens_per_ms() * cost


def longest_wait_ms(expected_ms: float) -> float:
    """Any wait for a drafter is bounded: three times what it should take, then the target goes on alone."""
    return 3.0 * expected_ms + 1.0
