"""What a request does next: its round begins, is prepared for or is waited for, and the workers are sent what follows.

The proposer decides what that is; `NextRound` carries it out, one request at a time.

`Dispatch`: a request's state as messages to the target: OPEN, VERIFY, HALT, PREPARE, CLOSE. Decides nothing and keeps
no state. The drafters' messages are the draft pool's.

`prepared`: chains for the outcomes that the target may find, so that a hit costs no message between two verifies. The
proposer decides about them as it would decide after the outcome.

`wait_for_chain`, `wait_for_branch`: how long a request waits for a drafter: never longer than what it waits for is
expected to take, with some slack.

`Alternation` (MineDraft, arXiv 2603.18016): the target verifies one half of the requests while the other half is
drafted for. Without it, requests whose outcomes come together are drafted for together and verified together: the
target waits for the drafter, then the drafter for the target. Alternation pays where two forwards over half the rows,
or a draft and one of them, take less than a draft and one forward over all.

`RemotePrefills`: prompts that another process reads in the target's place. The target reports what it has of a prompt;
the rest is read elsewhere where it is long enough. What is lost on the way costs time: the target, asked again, reads
on by itself. Knows requests and messages, no keys or values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from outrider.orchestrator.core.draft_pool import DraftPool, Workers, opening
from outrider.orchestrator.core.metrics import RoundMetrics
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.proposer import AskDrafters, Proposer, Step, WaitForBranch, longest_wait_ms
from outrider.orchestrator.core.request import DrafterWait, Request, remaining_length, remaining_tokens, up_to_end
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Close, Halt, Message, Prefill, Prefilled, Prepare, PromptKv, Verify


def may_prepare(request: Request, proposer: Proposer) -> bool:
    """Not during a wait, nor where an in-process drafter drafts too. A residual q would travel twice."""
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


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends a request's state to the target."""

    workers: Workers

    def open(self, request: Request, offered: bool) -> None:
        """It reads the committed tokens, unless they are `offered` to a prefill worker; its answer is the outcome of an
        empty chain."""
        self.workers.send_target(replace(opening(request, None), offered=offered))

    def verify(self, request: Request) -> None:
        """The request's proposal, in its round."""
        proposal = request.proposal
        self.workers.send_target(
            Verify(
                request=request.id,
                epoch=request.epoch,
                round=request.round,
                base_len=request.base_len,
                chain=proposal.chain,
                kind=proposal.kind(request.admit.sampling),
                q=proposal.q,
                autonomous=proposal.autonomous,
                draft=proposal.draft,
                drafter=proposal.drafter if proposal.draft else "",
                max_tokens=remaining_length(request, self.workers.target_context)
                if proposal.autonomous or proposal.draft
                else 0,
                parents=proposal.parents,
                min_prob=proposal.min_prob,
            )
        )

    def again(self, request: Request) -> None:
        """The round under way once more: the target answers from what it has said, works on, or says RESYNC."""
        self.verify(request)
        if request.halted:
            self.halt(request)

    def halt(self, request: Request) -> None:
        """The target is not to go on by itself."""
        self.workers.send_target(Halt(request=request.id, epoch=request.epoch))

    def prepare(self, request: Request) -> None:
        """What the target may go on with after the round under way."""
        chains = request.prepared.values()
        self.workers.send_target(
            Prepare(
                request=request.id,
                epoch=request.epoch,
                round=request.round,
                base_len=request.base_len,
                committed=tuple(request.prepared),
                chains=tuple(proposal.chain for proposal in chains),
                parents=tuple(p.parents for p in chains) if any(p.parents for p in chains) else (),
            )
        )

    def close(self, request: Request) -> None:
        self.workers.send_target(Close(request.id))


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
        """The target has begun the next round by itself; HALT follows where that is to be the last such one."""
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
        """Ends the wait where no drafter is left to wait for."""
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


@dataclass(slots=True)
class RemotePrefill:
    """A prompt in its `epoch` that was offered, or is read by `worker`; so many tokens are `left`."""

    epoch: int
    left: int
    worker: str = ""


class RemotePrefills:
    """The readings under way, by request. `min_tokens`: shorter prompts are the target's own matter."""

    def __init__(self, workers: Workers, dispatch: Dispatch, min_tokens: int) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._min_tokens = min_tokens
        self._prefills: dict[str, RemotePrefill] = {}
        self._asked: set[str] = set()

    def offer(self, request: Request) -> bool:
        """Whether the target is to wait, before it reads, for what becomes of this prompt."""
        self.forget(request)
        left = len(request.tokens) - 1
        if left < self._min_tokens or not self._workers.prefill_workers():
            return False
        self._prefills[request.id] = RemotePrefill(request.epoch, left)
        return True

    def on_progress(self, request: Request, message: Prefilled) -> None:
        """The target has so much of a prompt: the worker with the least to read gets the rest, or the target."""
        reading = self._prefills.get(request.id)
        if reading is None or reading.epoch != message.epoch:
            return
        reading.left = message.total - 1 - message.done
        if reading.worker or reading.left <= 0:
            return
        workers = self._workers.prefill_workers()
        if reading.left < self._min_tokens or not workers:
            self._hand_back(request)
            return
        reading.worker = min(sorted(workers), key=self._load)
        self._asked.add(reading.worker)
        tokens = np.asarray(request.tokens, np.int32)
        self._workers.send_worker(reading.worker, Prefill(request.id, request.epoch, tokens, message.done))

    def has_asked(self, worker: str) -> bool:
        """Whether this is a prefill worker whose words come here."""
        return worker in self._asked

    def on_message(self, request: Request | None, sender: str, message: Message) -> bool:
        """Takes what a prefill worker says; False: it is of no use any more."""
        reading = self._prefills.get(request.id) if request is not None else None
        if request is None or reading is None or reading.worker != sender:
            return False
        if isinstance(message, PromptKv):
            if message.epoch != reading.epoch:
                return False
            request.metrics.handed_over += message.count
            self._workers.send_target(message)
        else:
            self._hand_back(request)
        return True

    def on_worker_lost(self, worker: str, requests: Mapping[str, Request]) -> None:
        """It reads no more: the target does."""
        self._asked.discard(worker)
        for id_ in [id_ for id_, reading in self._prefills.items() if reading.worker == worker]:
            self._hand_back(requests[id_])

    def forget(self, request: Request) -> None:
        """Stops the remote reading: the prompt has been read, or the target reads it, or the request is over."""
        reading = self._prefills.pop(request.id, None)
        if reading is not None and reading.worker:
            self._workers.send_worker(reading.worker, Close(request.id))

    def _hand_back(self, request: Request) -> None:
        """The target reads on by itself."""
        self.forget(request)
        self._dispatch.again(request)

    def _load(self, worker: str) -> int:
        return sum(reading.left for reading in self._prefills.values() if reading.worker == worker)
