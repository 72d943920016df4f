"""What the target is to have prepared: chains for the outcomes it may find, so a hit costs no word between verifies.

The proposer decides about them as it would decide after the outcome. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.orchestrator.core.limits import room, up_to_end
from outrider.orchestrator.core.proposals.proposal import Proposal
from outrider.orchestrator.core.proposals.proposer import Proposer
from outrider.orchestrator.core.request import Request


def may_prepare(request: Request, proposer: Proposer) -> bool:
    """Where nobody waits, nor drafts beside it. A residual q would travel twice."""
    ahead = request.mode == "ssd" and not proposer.unites(request)
    return ahead and not request.waiting and not request.admit.sampling.is_residual


def prepared(request: Request, proposer: Proposer, context: int) -> Iterator[tuple[tuple[int, ...], Proposal]]:
    """What follows on outcomes that have a complete branch and do not end the request."""
    for committed, found in request.cache.complete(request.depth):
        space = room(request, context, len(committed))
        if space > 0 and up_to_end(request, context, committed)[1] is None:
            yield committed, proposer.branch(request, found, space, committed)
