"""What the target is lent: chains for the outcomes it may find, so that a hit costs no word between two verifies.

The proposer decides about them as it would decide after the outcome. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.orchestrator.core.limits import room, up_to_end
from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.proposals import Proposer
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.speculation_cache import Outcome


def may_lend(request: Request) -> bool:
    """Once a round's branches are complete, and where nobody waits. A residual q would travel twice."""
    return (
        request.mode == "ssd" and request.cache.final and not request.waiting and not request.admit.sampling.is_residual
    )


def lent(request: Request, proposer: Proposer, context: int) -> Iterator[tuple[Outcome, Proposal]]:
    """What follows on outcomes that have a branch and do not end the request."""
    for (accepted, bonus), found in request.cache.items():
        committed = (*request.proposal.chain[:accepted], bonus)
        space = room(request, context, len(committed))
        if space > 0 and up_to_end(request, context, committed)[1] is None:
            yield (accepted, bonus), proposer.branch(request, found, space, committed)
