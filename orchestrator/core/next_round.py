"""What a request does next: its round begins, is prepared for or is waited for, and whoever has a part in it is
told.

What that is the proposer decides; this carries it out. Knows one request at a time.

`may_prepare`: what the target is to have prepared: chains for the outcomes it may find, so a hit costs no word between
verifies. The proposer decides about them as it would decide after the outcome. Sends nothing.

`wait_for_chain`: how long a request waits for a drafter: never longer than what it waits for is expected to take, with
some slack.

Alternation (MineDraft, arXiv 2603.18016): the target verifies one half of the requests, the other is drafted for.

Left alone, requests whose outcomes come together are drafted for together and verified together: the target waits for
the drafter, then the drafter for the target. Held apart, each half's chains are drafted, from exact features where a
head reads them, while the other half is verified. That pays where two forwards over half the rows, or a draft and one
of them, take less than a draft and one forward over all. Pure of time and messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from outrider.orchestrator.core.dispatch import Dispatch, Workers
from outrider.orchestrator.core.draft_pool import DraftPool
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.proposer import AskDrafters, Proposer, Step, WaitForBranch, longest_wait_ms
from outrider.orchestrator.core.request import DrafterWait, Request, remaining_tokens, up_to_end
from outrider.orchestrator.core.round_metrics import RoundMetrics
from outrider.protocol.clock import MILLISECOND_NS


def may_prepare(request: Request, proposer: Proposer) -> bool:
    """Where nobody waits, nor drafts beside it. A residual q would travel twice."""
    ahead = request.mode == "ssd" and not proposer.unites(request)
    return ahead and not request.wait and not request.admit.sampling.is_residual


def prepared(request: Request, proposer: Proposer, context: int) -> Iterator[tuple[tuple[int, ...], Proposal]]:
    """What follows on outcomes that have a complete branch and do not end the request."""
    for committed, found in request.cache.complete(request.depth):
        space = remaining_tokens(request, context, len(committed))
        if space > 0 and up_to_end(request, context, committed)[1] is None:
            yield committed, proposer.branch(request, found, space, committed)


# A wait that may include a drafter's first work, or that full depth asks for, gets this long before the target goes on.
PATIENCE_MS = 2000.0


def wait_for_chain(estimates: Estimates, step: AskDrafters, full_depth: bool, now_ns: int) -> DrafterWait:
    """The wait for a just-in-time chain, asked for now."""
    limit_ms = longest_wait_ms(estimates.draft_ms(step.depth))
    if full_depth or not estimates.has_drafted:
        limit_ms = max(limit_ms, PATIENCE_MS)
    if step.missed and not full_depth:
        limit_ms = _concurrent(estimates, limit_ms)
    return DrafterWait(now_ns, now_ns + int(limit_ms * MILLISECOND_NS))


def wait_for_branch(
    estimates: Estimates, request: Request, step: WaitForBranch, full_depth: bool, now_ns: int
) -> DrafterWait:
    """The wait for a branch to come or grow, begun now or gone on with; in all never longer than for a whole tree."""
    asked_ns = request.wait.asked_ns if request.wait else now_ns
    missed = request.wait.missed if request.wait else step.missed
    limit_ms = longest_wait_ms(step.milliseconds)
    whole_ms = _concurrent(estimates, longest_wait_ms((request.depth + 1) * estimates.depth_ms() + estimates.link_ms()))
    if full_depth:
        limit_ms = whole_ms = PATIENCE_MS
    deadline_ns = min(now_ns + int(limit_ms * MILLISECOND_NS), asked_ns + int(whole_ms * MILLISECOND_NS))
    return DrafterWait(asked_ns, deadline_ns, step.committed, missed)


def _concurrent(estimates: Estimates, limit_ms: float) -> float:
    """Of several requests none that missed waits past the others' next forward, whatever keeps the drafter: it goes
    along in the one behind."""
    return limit_ms if estimates.active == 1 else min(limit_ms, estimates.verify_ms(1))


def wait_for_others(estimates: Estimates, waiting: DrafterWait, depth: int, now_ns: int) -> DrafterWait:
    """The wait of a chain that has come, until the other half was verified."""
    limit_ms = longest_wait_ms(estimates.verify_ms(depth + 1))
    return DrafterWait(waiting.asked_ns, now_ns + int(limit_ms * MILLISECOND_NS), missed=waiting.missed)


class NextRound:
    """Begins rounds, and waits. `full_depth`: see `RoundSettings`."""

    def __init__(
        self,
        workers: Workers,
        dispatch: Dispatch,
        draft_pool: DraftPool,
        planner: Planner,
        proposer: Proposer,
        metrics: RoundMetrics,
        full_depth: bool,
    ) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._draft_pool = draft_pool
        self._planner = planner
        self._proposer = proposer
        self._metrics = metrics
        self._full_depth = full_depth

    def take(self, request: Request, step: Step, now_ns: int) -> None:
        match step:
            case Proposal():
                self.verify(request, step, now_ns)
            case AskDrafters():
                self._ask(request, step, now_ns)
            case WaitForBranch():
                self._wait_for_branch(request, step, now_ns)

    def verify(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """VERIFY to the target, and in the same breath COMMIT to the drafters."""
        waited, request.wait = request.wait, None
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
            self._draft_pool.prepare(request, now_ns)
        request.branches_at_ns = now_ns
        self._metrics.on_proposed(request, now_ns)
        self._planner.on_proposed(request)

    def on_autonomous_round(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """The target has begun the next round by itself; it is told when that is to be the last such one."""
        self._begin_round(request, proposal)
        if not proposal.autonomous:
            self._under_way(request, now_ns)
        elif not request.halted and (
            self._planner.wants_other(request) or not self._proposer.stays(request, self._remaining_tokens(request))
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

    def _ask(self, request: Request, step: AskDrafters, now_ns: int) -> None:
        """COMMIT without a chain: the drafters continue the committed text, and the wait for them is bounded."""
        self._metrics.on_asked(request, step.missed, now_ns)
        if step.missed:
            self._planner.on_missed(request)
        request.wait = wait_for_chain(self._planner.estimates, step, self._full_depth, now_ns)
        self._draft_pool.ask(request, step.depth, now_ns)

    def _wait_for_branch(self, request: Request, step: WaitForBranch, now_ns: int) -> None:
        """Waits, again when a push leaves more to wait for."""
        if request.wait is None:
            self._metrics.on_asked(request, False, now_ns)
        request.wait = wait_for_branch(self._planner.estimates, request, step, self._full_depth, now_ns)

    def end_wait(self, request: Request, now_ns: int) -> None:
        """Where nobody is left to wait for."""
        if request.wait and not request.awaits_drafters:
            held, request.held = request.held, None
            self.verify(request, held or self._proposer.as_it_is(request, self._remaining_tokens(request)), now_ns)

    def _remaining_tokens(self, request: Request) -> int:
        return remaining_tokens(request, self._workers.target_context)


# It has to be so much quicker by the estimates, which know nothing of the hop between two halves.
CLEARLY = 0.9


class Alternation:
    """Of SD's requests, by the two sides that they are on."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def side(self, requests: Collection[Request]) -> int:
        """Where a new one goes: to the fewer."""
        return int(2 * sum(request.side for request in requests) < len(requests))

    def holds(self, request: Request, requests: Collection[Request]) -> bool:
        """Whether a chain that has come waits until the other side's verify has ended."""
        mine = [other for other in requests if _takes_turns(other)]
        under_way = any(other.side != request.side and _is_verified(other) for other in mine)
        return under_way and _takes_turns(request) and self.pays(len(mine), request.depth)

    def pays(self, requests: int, depth: int) -> bool:
        """Whether so many requests with chains of `depth` take less time in two halves than together."""
        estimates, rows = self._estimates, depth + 1
        if requests < 2 or not estimates.has_drafted:
            return False
        draft, larger = estimates.draft_ms(depth), (requests + 1) // 2
        first, second = estimates.forward_ms(larger * rows), estimates.forward_ms((requests - larger) * rows)
        together = draft + estimates.forward_ms(requests * rows)
        return max(first + second, draft + first) < CLEARLY * together


def _takes_turns(request: Request) -> bool:
    return request.mode == "sd" and bool(request.drafters)


def _is_verified(request: Request) -> bool:
    """Whether the target has a round of it, other than its prompt."""
    return not (request.wait or request.reads or request.over)
