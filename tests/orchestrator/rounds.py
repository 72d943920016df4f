"""Makes ended rounds, for tests of what is recorded about them."""

from __future__ import annotations

from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.request import SettledRound
from outrider.protocol.messages import Outcome, Span


def make_settled_round(
    number: int, proposal: Proposal, outcome: Outcome, kept: int, decided: Span | None = None, waited: bool = False
) -> SettledRound:
    """Returns a round without a request, of which `kept` tokens count."""
    nodes = proposal.nodes(outcome) or ()
    kept_tokens = (0,) * kept
    return SettledRound(None, number, None, proposal, False, outcome, nodes, kept_tokens, None, decided, waited)  # type: ignore[arg-type]
