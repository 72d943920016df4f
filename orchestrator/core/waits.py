"""How long a request waits for a drafter: never longer than what it waits for is expected to take, with some slack."""

from __future__ import annotations

from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.proposals.fallback import longest_wait_ms
from outrider.orchestrator.core.proposals.proposer import Ask, Linger
from outrider.orchestrator.core.request import Request, Waiting
from outrider.protocol.clock import MILLISECOND_NS

# A wait that may include a drafter's first work, or that full depth asks for, gets this long before the target goes on.
PATIENCE_MS = 2000.0


def wait_for_chain(estimates: Estimates, step: Ask, full_depth: bool, now_ns: int) -> Waiting:
    """The wait for a just-in-time chain, asked for now."""
    limit_ms = longest_wait_ms(estimates.draft_ms(step.depth))
    if full_depth or not estimates.has_drafted:
        limit_ms = max(limit_ms, PATIENCE_MS)
    if step.missed and not full_depth:
        limit_ms = _in_company(estimates, limit_ms)
    return Waiting(now_ns, now_ns + int(limit_ms * MILLISECOND_NS))


def wait_for_branch(estimates: Estimates, request: Request, step: Linger, full_depth: bool, now_ns: int) -> Waiting:
    """The wait for a branch to come or grow, begun now or gone on with; in all never longer than for a whole tree."""
    asked_ns = request.waiting.asked_ns if request.waiting else now_ns
    missed = request.waiting.missed if request.waiting else step.missed
    limit_ms = longest_wait_ms(step.milliseconds)
    whole_ms = _in_company(estimates, longest_wait_ms((request.depth + 1) * estimates.depth_ms() + estimates.link_ms()))
    if full_depth:
        limit_ms = whole_ms = PATIENCE_MS
    deadline_ns = min(now_ns + int(limit_ms * MILLISECOND_NS), asked_ns + int(whole_ms * MILLISECOND_NS))
    return Waiting(asked_ns, deadline_ns, step.committed, missed)


def _in_company(estimates: Estimates, limit_ms: float) -> float:
    """Of several requests none that missed waits past the others' next forward, whatever keeps the drafter: it goes
    along in the one behind."""
    return limit_ms if estimates.active == 1 else min(limit_ms, estimates.verify_ms(1))


def wait_for_others(estimates: Estimates, waiting: Waiting, depth: int, now_ns: int) -> Waiting:
    """The wait of a chain that has come, until the other half was verified."""
    limit_ms = longest_wait_ms(estimates.verify_ms(depth + 1))
    return Waiting(waiting.asked_ns, now_ns + int(limit_ms * MILLISECOND_NS), missed=waiting.missed)
