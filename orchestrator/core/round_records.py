"""The rounds of one request as whoever asked to see them is told: each when it has ended, on the request's own clock.

Kept only for requests that asked (`Generate.rounds`). The ledger tells it what was asked, sent and drafted.
"""

from __future__ import annotations

from outrider.orchestrator.core.proposals.proposal import Lookup, Proposal
from outrider.orchestrator.core.trace import TARGETS_DRAFTER
from outrider.protocol.messages import Branches, Drafted, DraftWork, Outcome, RoundRecord, Span


class RoundRecords:
    """`began_ns` is zero on the request's clock. What a drafter did behind a round is told with the next that ends."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._asked_ns: int | None = None
        self._missed = False
        self._decided: dict[int, tuple[Lookup, Span]] = {}
        self._drafting: list[DraftWork] = []

    def asked(self, missed: bool, now_ns: int) -> None:
        """The next round waits for a drafter; `missed`: for a chain, after a lookup that found nothing."""
        self._asked_ns = now_ns if self._asked_ns is None else self._asked_ns
        self._missed = missed

    def proposed(self, number: int, proposal: Proposal, now_ns: int) -> None:
        """Round `number` is under way, or known to be."""
        since_ns = now_ns if self._asked_ns is None else self._asked_ns
        lookup = Lookup.MISS if self._missed else proposal.lookup
        self._decided[number] = lookup, self._told(Span(since_ns, now_ns))
        self._asked_ns, self._missed = None, False

    def lost(self) -> None:
        """Rounds that were begun or waited for have no outcome."""
        self._decided.clear()
        self._asked_ns, self._missed = None, False

    def drafted(self, drafter: str, message: Branches | Drafted, now_ns: int) -> None:
        """Work of before the request, or of a time that cannot be, is left out."""
        work = message.work
        if not self._began_ns <= work.started_ns <= work.ended_ns <= now_ns:
            return
        depth, branches = (
            (message.depth, len(message.entries)) if isinstance(message, Branches) else (len(message.chain), 0)
        )
        self._drafting.append(DraftWork(drafter, message.round, depth, branches, self._told(work)))

    def ended(self, number: int, proposal: Proposal, outcome: Outcome, kept: int) -> RoundRecord:
        """Of round `number`, of whose tokens `kept` count."""
        drafting, self._drafting = self._drafting, []
        if outcome.drafting is not None:
            work = self._told(outcome.drafting)
            drafting.append(DraftWork(proposal.drafter or TARGETS_DRAFTER, number, len(proposal.chain), 0, work))
        lookup, decided = self._decided.pop(number, (proposal.lookup, None))
        return RoundRecord(
            round=number,
            lookup=lookup.value,
            source=proposal.source.value,
            drafted=len(proposal.chain),
            accepted=min(outcome.accepted, kept),
            tokens=kept,
            verify=self._told(outcome.work),
            decided=decided,
            drafting=tuple(drafting),
        )

    def _told(self, span: Span) -> Span:
        return Span(max(span.started_ns - self._began_ns, 0), max(span.ended_ns - self._began_ns, 0))
