"""Begins a request's next round, prepares for it or waits for it, and sends the workers what follows.

The proposer decides the step; `NextRound` carries it out, one request at a time.

`Dispatch` sends a request's state to the target: OPEN, VERIFY, HALT, PREPARE, CLOSE. It decides nothing and keeps no
state. The draft pool sends the drafters' messages.

Chains are prepared at the target for likely outcomes, so that a hit costs no message between two verifies. The proposer
decides about them as it would after the outcome.

`wait_for_chain` and `wait_for_branch` bound the wait for a drafter by its expected time and some slack.

`RemotePrefills` lets prefill workers read prompts in the target's place. The target reports how much of a prompt it
has; the rest goes to a worker if it is long enough. A loss only costs time: the target, asked again, reads on by
itself. Knows requests and messages, no keys or values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from outrider.orchestrator.core.draft_pool import DraftPool, opening
from outrider.orchestrator.core.metrics import RoundMetrics
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.proposer import AskDrafters, Proposer, Step, WaitForBranch, longest_wait_ms
from outrider.orchestrator.core.request import DrafterWait, Request, remaining_length, remaining_tokens, up_to_end
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Close, Halt, Message, Prefill, Prefilled, Prepare, PromptKv, Verify

# The limit of a wait that may include a drafter's first work, or that full depth requires.
PATIENCE_MS = 2000.0


def wait_for_chain(estimates: Estimates, step: AskDrafters, full_depth: bool, now_ns: int) -> DrafterWait:
    """Returns the wait for a chain that is requested now."""
    limit_ms = longest_wait_ms(estimates.draft_ms(step.depth))
    if full_depth or not estimates.has_drafted:
        limit_ms = max(limit_ms, PATIENCE_MS)
    if step.missed and not full_depth:
        limit_ms = _until_next_forward(estimates, limit_ms)
    return DrafterWait(now_ns, now_ns + int(limit_ms * MILLISECOND_NS))


def wait_for_branch(
    estimates: Estimates, request: Request, step: WaitForBranch, full_depth: bool, now_ns: int
) -> DrafterWait:
    """Returns a new or continued wait for a branch to come or grow; in all it is no longer than for a whole tree."""
    asked_ns = request.wait.asked_ns if request.wait else now_ns
    missed = request.wait.missed if request.wait else step.missed
    limit_ms = longest_wait_ms(step.milliseconds)
    whole_ms = longest_wait_ms((request.depth + 1) * estimates.depth_ms() + estimates.link_ms())
    whole_ms = _until_next_forward(estimates, whole_ms)
    if full_depth:
        limit_ms = whole_ms = PATIENCE_MS
    deadline_ns = min(now_ns + int(limit_ms * MILLISECOND_NS), asked_ns + int(whole_ms * MILLISECOND_NS))
    return DrafterWait(asked_ns, deadline_ns, step.committed, missed)


def _until_next_forward(estimates: Estimates, limit_ms: float) -> float:
    """Limits the wait after a miss to the other requests' next forward, if there are others: it joins the one after."""
    return limit_ms if estimates.active == 1 else min(limit_ms, estimates.verify_ms(1))


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends a request's state to the target."""

    workers: WorkerPool

    def open(self, request: Request, offered: bool) -> None:
        """Sends OPEN: the target reads the committed tokens, unless they are `offered` to a prefill worker, and answers
        with the outcome of an empty chain."""
        self.workers.send_target(replace(opening(request, None), offered=offered))

    def verify(self, request: Request) -> None:
        """Sends VERIFY with the request's proposal."""
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
                all_cores=proposal.autonomous and request.admit.mode == "auto",
            )
        )

    def again(self, request: Request) -> None:
        """Sends the round under way again: the target repeats its answer, continues its work, or answers RESYNC."""
        self.verify(request)
        if request.halted:
            self.halt(request)

    def halt(self, request: Request) -> None:
        """Sends HALT: the target must not continue by itself."""
        self.workers.send_target(Halt(request=request.id, epoch=request.epoch))

    def prepare(self, request: Request) -> None:
        """Sends PREPARE with the chains that the target may continue with after the round under way."""
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
    """Begins rounds and waits. `full_depth`: see `RoundSettings`."""

    def __init__(
        self,
        workers: WorkerPool,
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
        """Begins a round: VERIFY to the target and, in the same flush, COMMIT to the drafters."""
        waited, request.wait = request.wait, None
        self._begin_round(request, proposal.after_wait(waited.missed) if waited else proposal)
        self._dispatch.verify(request)
        self._under_way(request, now_ns)

    def _begin_round(self, request: Request, proposal: Proposal) -> None:
        request.round += 1
        request.base_len = len(request.tokens)
        request.proposal = proposal

    def _under_way(self, request: Request, now_ns: int) -> None:
        """Requests branches for the round under way, and records its proposal."""
        request.cache.start()
        request.prepared = {}
        if request.mode == "ssd" and request.drafters:
            self._draft_pool.prepare(request, now_ns)
        request.branches_at_ns = now_ns
        self._metrics.on_proposed(request, now_ns)
        self._planner.on_proposed(request)

    def on_autonomous_round(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """Follows a target that has begun the next round by itself, and sends HALT if it is to be the last such one."""
        self._begin_round(request, proposal)
        if not proposal.autonomous:
            self._under_way(request, now_ns)
        elif not request.halted and (
            self._planner.wants_other(request) or not self._proposer.stays(request, self._remaining_tokens(request))
        ):
            request.halted = True
            self._dispatch.halt(request)

    def prepare(self, request: Request) -> None:
        """Prepares chains at the target for the outcomes that have a complete branch and do not end the request.

        Not during a wait, in a tree with in-process drafts, with a residual q, which would be sent twice, or if the
        policy may have another plan after this round.
        """
        ahead = request.mode == "ssd" and not self._proposer.unites(request)
        if not ahead or request.wait or request.admit.sampling.is_residual or self._planner.may_replan(request):
            return
        request.prepared, context = {}, self._workers.target_context
        for committed, branch in request.cache.complete(request.depth):
            space = remaining_tokens(request, context, len(committed))
            if space > 0 and up_to_end(request, context, committed)[1] is None:
                request.prepared[committed] = self._proposer.branch(request, branch, space, committed)
        if request.prepared:
            self._dispatch.prepare(request)

    def _ask(self, request: Request, step: AskDrafters, now_ns: int) -> None:
        """Requests a chain after the committed text (COMMIT without a chain), and begins a bounded wait for it."""
        self._metrics.on_wait(request, step.missed, now_ns)
        if step.missed:
            self._planner.on_missed(request)
        request.wait = wait_for_chain(self._planner.estimates, step, self._full_depth, now_ns)
        self._draft_pool.ask(request, step.depth, now_ns)

    def _wait_for_branch(self, request: Request, step: WaitForBranch, now_ns: int) -> None:
        """Begins a wait for a branch, or continues it after a push."""
        if request.wait is None:
            self._metrics.on_wait(request, False, now_ns)
        request.wait = wait_for_branch(self._planner.estimates, request, step, self._full_depth, now_ns)

    def end_wait(self, request: Request, now_ns: int) -> None:
        """Ends the wait if all drafters are done."""
        if request.wait and not request.awaits_drafters:
            self.verify(request, self._proposer.after_wait(request, self._remaining_tokens(request)), now_ns)

    def _remaining_tokens(self, request: Request) -> int:
        return remaining_tokens(request, self._workers.target_context)


@dataclass(slots=True)
class RemotePrefill:
    """A prompt in its `epoch` that was offered, or that `worker` reads, with `left` tokens unread."""

    epoch: int
    left: int
    worker: str = ""


class RemotePrefills:
    """The remote prefills under way, by request. The target itself reads prompts shorter than `min_tokens`."""

    def __init__(self, workers: WorkerPool, dispatch: Dispatch, min_tokens: int) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._min_tokens = min_tokens
        self._prefills: dict[str, RemotePrefill] = {}
        self._asked: set[str] = set()

    def offer(self, request: Request) -> bool:
        """Offers a prompt to the prefill workers; returns whether the target is to wait before it reads."""
        self.forget(request)
        left = len(request.tokens) - 1
        if left < self._min_tokens or not self._workers.prefill_workers():
            return False
        self._prefills[request.id] = RemotePrefill(request.epoch, left)
        return True

    def on_progress(self, request: Request, message: Prefilled) -> None:
        """Sends the rest of a prompt, of which the target has a part, to the least busy worker, or the target."""
        prefill = self._prefills.get(request.id)
        if prefill is None or prefill.epoch != message.epoch:
            return
        prefill.left = message.total - 1 - message.done
        if prefill.worker or prefill.left <= 0:
            return
        workers = self._workers.prefill_workers()
        if prefill.left < self._min_tokens or not workers:
            self._hand_back(request)
            return
        prefill.worker = min(sorted(workers), key=self._load)
        self._asked.add(prefill.worker)
        tokens = np.asarray(request.tokens, np.int32)
        self._workers.send_worker(prefill.worker, Prefill(request.id, request.epoch, tokens, message.done))

    def has_asked(self, worker: str) -> bool:
        """Whether a worker was sent a prompt, so that its messages come here."""
        return worker in self._asked

    def on_message(self, request: Request | None, sender: str, message: Message) -> bool:
        """Handles a prefill worker's message; returns False if it is stale."""
        prefill = self._prefills.get(request.id) if request is not None else None
        if request is None or prefill is None or prefill.worker != sender:
            return False
        if isinstance(message, PromptKv):
            if message.epoch != prefill.epoch:
                return False
            request.metrics.handed_over += message.count
            self._workers.send_target(message)
        else:
            self._hand_back(request)
        return True

    def on_worker_lost(self, worker: str, requests: Mapping[str, Request]) -> None:
        """Hands the prompts of a lost worker back to the target."""
        self._asked.discard(worker)
        for id_ in [id_ for id_, prefill in self._prefills.items() if prefill.worker == worker]:
            self._hand_back(requests[id_])

    def forget(self, request: Request) -> None:
        """Ends a remote prefill: the prompt has been read, the target reads it, or the request has ended."""
        prefill = self._prefills.pop(request.id, None)
        if prefill is not None and prefill.worker:
            self._workers.send_worker(prefill.worker, Close(request.id))

    def _hand_back(self, request: Request) -> None:
        """Lets the target read on by itself."""
        self.forget(request)
        self._dispatch.again(request)

    def _load(self, worker: str) -> int:
        return sum(prefill.left for prefill in self._prefills.values() if prefill.worker == worker)
