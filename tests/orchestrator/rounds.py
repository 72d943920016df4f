"""Rounds that have ended, for tests of what is recorded about them."""

from __future__ import annotations

from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.request import SettledRound
from outrider.protocol.messages import Outcome


def settled(number: int, proposal: Proposal, outcome: Outcome, kept: int) -> SettledRound:
    """A round of no request, with so many tokens that count."""
    nodes = proposal.nodes(outcome) or ()
    return SettledRound(None, number, None, proposal, False, outcome, nodes, (0,) * kept, 0, None)  # type: ignore[arg-type]
