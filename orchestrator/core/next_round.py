"""What a request does next: its round begins, is prepared for or is waited for, and whoever has a part in it is told.

What that is the proposer decides; this carries it out. Knows one request at a time.
"""

from __future__ import annotations

from outrider.orchestrator.core.crew import Crew
from outrider.orchestrator.core.dispatch import Dispatch, Workers
from outrider.orchestrator.core.ledger import Ledger
from outrider.orchestrator.core.limits import room
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.preparing import may_prepare, prepared
from outrider.orchestrator.core.proposals.proposal import Proposal
from outrider.orchestrator.core.proposals.proposer import Ask, Linger, Proposer, Step
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.waits import wait_for_branch, wait_for_chain


class NextRound:
    """Begins rounds, and waits. `full_depth`: see `RoundSettings`."""

    def __init__(
        self,
        workers: Workers,
        dispatch: Dispatch,
        crew: Crew,
        planner: Planner,
        proposer: Proposer,
        ledger: Ledger,
        full_depth: bool,
    ) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._crew = crew
        self._planner = planner
        self._proposer = proposer
        self._ledger = ledger
        self._full_depth = full_depth

    def take(self, request: Request, step: Step, now_ns: int) -> None:
        match step:
            case Proposal():
                self.verify(request, step, now_ns)
            case Ask():
                self._ask(request, step, now_ns)
            case Linger():
                self._linger(request, step, now_ns)

    def verify(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """VERIFY to the target, and in the same breath COMMIT to the drafters."""
        waited, request.waiting = request.waiting, None
        self._begin_round(request, proposal.after_wait(waited.missed) if waited else proposal)
        self._dispatch.verify(request)
        self._under_way(request, now_ns)

    def _begin_round(self, request: Request, proposal: Proposal) -> None:
        request.round += 1
        request.base_len = len(request.tokens)
        request.proposal = proposal

    def _under_way(self, request: Request, now_ns: int) -> None:
        """The target has its round; the drafters are to prepare its outcomes."""
        request.cache.start()
        request.prepared = {}
        if request.mode == "ssd" and request.drafters:
            self._crew.prepare(request, now_ns)
        request.branches_at_ns = now_ns
        self._ledger.proposed(request, now_ns)
        self._planner.proposed(request)

    def went_on(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """The target has begun the next round by itself; it is told when that is to be the last such one."""
        self._begin_round(request, proposal)
        if not proposal.going_on:
            self._under_way(request, now_ns)
        elif not request.halted and (
            self._planner.wants_other(request) or not self._proposer.stays(request, self._room(request))
        ):
            request.halted = True
            self._dispatch.halt(request)

    def prepare(self, request: Request) -> None:
        """PREPARE to the target, unless the controller may have another plan after this round."""
        if not may_prepare(request, self._proposer) or self._planner.may_replan(request):
            return
        request.prepared = dict(prepared(request, self._proposer, self._workers.target_context))
        if request.prepared:
            self._dispatch.prepare(request)

    def _ask(self, request: Request, step: Ask, now_ns: int) -> None:
        """COMMIT without a chain: the drafters continue the committed text, and the wait for them is bounded."""
        self._ledger.asked(request, step.missed, now_ns)
        if step.missed:
            self._planner.missed(request)
        request.waiting = wait_for_chain(self._planner.estimates, step, self._full_depth, now_ns)
        self._crew.ask(request, step.depth, now_ns)

    def _linger(self, request: Request, step: Linger, now_ns: int) -> None:
        """Waits, again when a push leaves more to wait for."""
        if request.waiting is None:
            self._ledger.asked(request, False, now_ns)
        request.waiting = wait_for_branch(self._planner.estimates, request, step, self._full_depth, now_ns)

    def end_wait(self, request: Request, now_ns: int) -> None:
        """Where nobody is left to wait for."""
        if request.waiting and not request.awaits_drafters:
            held, request.held = request.held, None
            self.verify(request, held or self._proposer.as_it_is(request, self._room(request)), now_ns)

    def _room(self, request: Request) -> int:
        return room(request, self._workers.target_context)
