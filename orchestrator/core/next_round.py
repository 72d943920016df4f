"""Decides what a request verifies next, and begins that round: the one place where AR, SD and SSD differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import sub

from outrider.orchestrator.core.draft_pool import DraftPool, open_message
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import (
    CopiedTail,
    Lookup,
    Proposal,
    best_tail,
    choose_fallback,
    extend_by_copy,
    longest_copy,
    merge_into_tree,
    min_alternative_prob,
    propose_copy,
    should_draft,
    should_merge_in_process,
    should_wait_for_branch,
    should_wait_for_token,
)
from outrider.orchestrator.core.request import CachedBranch, DrafterWait, Request, SettledRound
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Drafted, Halt, InProcess, Prepare, Span, Verify
from outrider.protocol.ngrams import MAX_COPY_TOKENS
from outrider.protocol.schema import MAX_BRANCHES, Origin

# Limits of a wait: before the drafter has drafted or in full depth; and of any, as drafters report the expected times.
MAX_FIRST_WAIT_MS, MAX_WAIT_MS = 2000.0, 5000.0

# A target that looks n-grams up by itself gets new costs of rows when those of its first tokens have changed this much.
MAX_COST_CHANGE, MAX_COMPARED_COSTS = 0.15, 4

# If the outcome is expected later than this many pushes of the lead, there is time to prepare what the next one brings.
MAX_OUTCOME_PUSHES = 1.25

PLAIN_DECODING = Proposal(autonomous=True)
Step = Proposal | DrafterWait
"""What a request does next: it verifies, or waits for drafters first."""


def max_wait_ms(expected_ms: float, verify_ms: float = 0.0) -> float:
    """Returns the limit of a wait for a drafter: three times the expected time; then the target continues alone."""
    return min(3.0 * expected_ms + 1.0, max(3.0 * verify_ms, MAX_WAIT_MS))


@dataclass(frozen=True, slots=True)
class Proposer:
    """Decides the next step by the request, the estimates and the time; sends nothing.

    With `full_depth` each round waits for all branches in full. `target_has_ngrams`: whether the target looks n-grams
    up by itself, which saves a message a round.
    """

    estimates: Estimates
    full_depth: bool
    target_has_ngrams: Callable[[], bool]

    def next_step(self, request: Request, committed: tuple[int, ...], now_ns: int) -> Step:
        """Returns the step after the outcome that made `committed` final."""
        if request.plan.mode == "ar":
            return PLAIN_DECODING
        if request.max_chain_tokens < 1:
            return Proposal()
        if request.plan.mode == "ssd" and request.draft.drafters:
            return self.look_up(request, committed, now_ns)
        drafter = request.plan.drafter
        only_ngrams = drafter == NGRAM or not (drafter or request.draft.drafters)
        if only_ngrams and self.target_has_ngrams() and not self.full_depth:
            return self._propose_ngrams()
        tail = self._best_tail(request)
        if only_ngrams:
            return propose_copy(tail.tokens) if tail.tokens or self.full_depth else PLAIN_DECODING
        if not should_draft(self.estimates, tail, request.max_draft_tokens, drafter):
            return propose_copy(tail.tokens)
        if drafter:
            copy = self._copy_for_tree(request)
            drafted = self._propose_in_process(request, propose_copy(copy))
            return drafted if copy else replace(drafted, autonomous=True)
        return self.wait_for_chain(request.max_draft_tokens, now_ns)

    def _propose_in_process(self, request: Request, beside: Proposal, depth: int = 0) -> Proposal:
        """Returns the proposal of `depth` tokens (0: the plan's K) by the plan's in-process drafter, in one tree with
        `beside`."""
        drafter = request.plan.drafter
        source = Origin.HEAD if self.estimates.in_process[drafter].is_head else Origin.DRAFTED
        min_prob = min_alternative_prob(self.estimates, request.takes_trees)
        draft = InProcess(depth or request.plan.depth, drafter, min_prob)
        return replace(beside, source=source, draft=draft, drafter=drafter, by=beside.token_origins, offered=())

    def _propose_ngrams(self) -> Proposal:
        """Returns the proposal of n-grams that the target looks up by itself, round after round."""
        draft = InProcess(MAX_COPY_TOKENS, NGRAM, row_costs=tuple(self.estimates.row_costs(MAX_COPY_TOKENS)))
        return Proposal(source=Origin.COPIED, autonomous=True, draft=draft, drafter=NGRAM)

    def _copy_for_tree(self, request: Request) -> tuple[int, ...]:
        """Returns the part of a copy that is worth its rows in one tree with an in-process chain.

        The two are assumed to be right independently of each other; a token that both propose costs one row.
        """
        if not request.takes_trees:
            return ()
        copy, depth = longest_copy(request.sequence.ngrams, request.max_chain_tokens), request.max_draft_tokens
        drafted, row = self.estimates.acceptance_of(request.plan.drafter), self.estimates.row_cost()
        reach, gain, best, count = 1.0, 0.0, 0.0, 0
        for position in range(len(copy.chain)):
            reach *= self.estimates.copied.rate(copy.evidence, position)
            both = reach * drafted.reach(position) if position < depth else 0.0
            gain += reach - both - row * (1.0 - both)
            if gain > best:
                best, count = gain, position + 1
        return copy.chain[:count]

    def should_merge_in_process(self, request: Request) -> bool:
        """Whether a branch and an in-process chain are verified in one tree."""
        drafter, depth = request.in_process_drafter, request.plan.depth
        return bool(drafter) and request.takes_trees and should_merge_in_process(self.estimates, drafter, depth)

    def should_continue(self, request: Request) -> bool:
        """Whether an autonomous target should continue by itself: the next proposal would be about the same."""
        if request.max_chain_tokens < 1:
            return True
        step, under_way = self.next_step(request, (), 0), request.round.proposal
        if isinstance(step, DrafterWait) or not step.autonomous or step.drafter != under_way.drafter:
            return False
        costs, before = (proposal.draft.row_costs if proposal.draft else () for proposal in (step, under_way))
        changes = map(sub, costs[:MAX_COMPARED_COSTS], before)
        return max(map(abs, changes), default=0.0) <= MAX_COST_CHANGE

    def _best_tail(self, request: Request) -> CopiedTail:
        """Returns the part of a copy after the committed text that is worth its rows, if estimates may decide that."""
        if self._is_reproducible(request):
            return CopiedTail()
        return best_tail(self.estimates, longest_copy(request.sequence.ngrams, request.max_chain_tokens))

    def branch(self, request: Request, cached: CachedBranch, committed: tuple[int, ...] = ()) -> Proposal:
        """Returns a branch as a proposal, extended by a copy; the n-grams have not seen the `committed` tokens yet."""
        return self._complete_chain(request, cached, Origin.PREPARED, Lookup.HIT, committed)

    def drafted(self, request: Request, drafter: str, message: Drafted) -> Proposal:
        """Returns a chain on request as a proposal, extended by a copy."""
        chain = CachedBranch(message.chain, message.q, drafter, message.alternatives, message.odds)
        return self._complete_chain(request, chain, Origin.DRAFTED if message.chain else Origin.TARGET)

    def after_wait(self, request: Request) -> Proposal:
        """Returns the proposal after a wait: its branch, as deep as it is, or a copy."""
        wait = request.round.wait
        cached = request.draft.cache.lookup(wait.outcome) if wait and wait.outcome else None
        return self.branch(request, cached) if cached else propose_copy(self._best_tail(request).tokens)

    def _complete_chain(
        self,
        request: Request,
        drafted: CachedBranch,
        source: Origin,
        lookup: Lookup = Lookup.NONE,
        committed: tuple[int, ...] = (),
    ) -> Proposal:
        """Returns a chain as a proposal: truncated, extended, or merged with others into a tree, unless rounds are
        reproducible or it comes with its q. An end token needs no row: without it, the target chooses it as well."""
        max_chain_tokens, is_residual = request.max_chain_tokens - len(committed), request.admit.sampling.is_residual
        chain = drafted.chain[: max(min(request.plan.depth, max_chain_tokens), 0)]
        kept, reason = request.truncate_at_end(chain)
        chain = tuple(kept[:-1]) if reason == "eos" and not is_residual else chain
        q = drafted.q.part(0, len(chain)) if drafted.q is not None and is_residual else None
        proposal = Proposal(chain, source, lookup, q=q, drafter=drafted.drafter, offered=chain)
        if self.full_depth or is_residual:
            return proposal
        ngrams, odds = request.sequence.ngrams, drafted.odds[: len(chain)]
        if request.takes_trees:
            tree = merge_into_tree(
                self.estimates, ngrams, proposal, committed, max_chain_tokens, drafted.alternatives, odds
            )
            if tree is not None:
                return tree
        return extend_by_copy(self.estimates, ngrams, proposal, committed, max_chain_tokens, odds)

    def look_up(self, request: Request, committed: tuple[int, ...], now_ns: int) -> Step:
        """Looks the outcome up. A hit is served as deep as it is, unless one more token is worth its wait."""
        draft = request.draft
        cached = draft.cache.lookup(committed)
        if self.full_depth and not draft.final:
            return self._wait_for_branch(request, committed, 0.0, now_ns, cached is None)
        if cached is None:
            return self._after_miss(request, committed, now_ns)
        hit = self.branch(request, cached)
        if self.should_merge_in_process(request):
            return self._propose_in_process(request, hit)
        if self._should_grow(request, cached, hit, draft.since_push_ms(now_ns)):
            return self._wait_for_branch(request, committed, self.estimates.depth_ms(), now_ns)
        return hit

    def _should_grow(self, request: Request, cached: CachedBranch, hit: Proposal, since_push_ms: float) -> bool:
        """Whether one more token of a branch, which is proposed as `hit`, is worth its wait, this long after the latest
        push. In full depth it always is. A branch that a copy continues, or that has an end token, does not wait."""
        depth, has_copy = len(cached.chain), Origin.COPIED in hit.token_origins
        is_whole = depth >= request.max_draft_tokens or request.truncate_at_end(cached.chain)[1] is not None
        if has_copy or is_whole or not request.draft.can_grow(cached):
            return False
        return self.full_depth or should_wait_for_token(self.estimates, depth, since_push_ms, cached.odds)

    def _is_reproducible(self, request: Request) -> bool:
        """Whether no estimate may decide what is verified: full depth makes residual texts reproducible."""
        return self.full_depth and request.admit.sampling.is_residual

    def _after_miss(self, request: Request, committed: tuple[int, ...], now_ns: int) -> Step:
        """Returns the fallback, or a wait for branches of this outcome that are on their way and worth it."""
        max_draft_tokens, draft = request.max_draft_tokens, request.draft
        if self._is_reproducible(request) and draft.drafters:
            return self.wait_for_chain(max_draft_tokens, now_ns, missed=True)
        tail = self._best_tail(request)
        choice = choose_fallback(
            self.estimates, tail, max_draft_tokens, bool(draft.drafters), request.in_process_drafter
        )
        line = request.round.proposal.line
        is_on_alternative = committed[:-1] != line[: len(committed) - 1]  # an alternative's branch holds the rest
        pushes = 0 if is_on_alternative else draft.pushes_left(len(committed) - 1, len(line))
        if pushes:
            expected_ms = pushes * self.estimates.depth_ms()
            expected_ms += self.estimates.link_ms() if not draft.drafters[draft.lead].pushes else 0.0
            # An overdue push is expected to take as long again.
            wait_ms = abs(expected_ms - draft.since_push_ms(now_ns))
            if should_wait_for_branch(self.estimates, choice, max_draft_tokens, wait_ms):
                return self._wait_for_branch(request, committed, wait_ms, now_ns, missed=True)
        if choice.wait_for:
            return self.wait_for_chain(choice.wait_for, now_ns, missed=True)
        if choice.in_process:
            copy = replace(propose_copy(self._copy_for_tree(request)), lookup=Lookup.MISS)
            return self._propose_in_process(request, copy, choice.in_process)
        return replace(propose_copy(tail.tokens), lookup=Lookup.MISS)

    # --- what the target may decide by itself ---------------------------------------------------------------------

    def servable(self, request: Request, left_ms: float | None) -> Iterator[tuple[tuple[int, ...], Proposal]]:
        """Yields (outcome, proposal) for the branches that do not end the request: all of them, or, with `left_ms`,
        those that would be served as deep as they are if the outcome came in this time."""
        for committed, cached in request.draft.cache.branches.items():
            if request.max_chain_tokens > len(committed) and request.truncate_at_end(committed)[1] is None:
                hit = self.branch(request, cached, committed)
                if left_ms is None or not self._should_grow(request, cached, hit, left_ms):
                    yield committed, hit

    def miss_row_costs(self, request: Request, left_ms: float) -> tuple[float, ...]:
        """Returns the costs by which the target chooses n-grams after a miss; (): it waits for VERIFY, because a wait
        for a drafter may be better, or an in-process drafter drafts."""
        estimates, draft = self.estimates, request.draft
        if self.full_depth or request.in_process_drafter or not self.target_has_ngrams():
            return ()
        choice = choose_fallback(estimates, CopiedTail(), request.max_draft_tokens, bool(draft.drafters))
        if choice.wait_for:
            return ()
        length = len(request.round.proposal.line)
        pushes = max(draft.pushes_left(accepted, length) for accepted in {0, length})
        if pushes:
            wait_ms = abs(pushes * estimates.depth_ms() - left_ms)
            if should_wait_for_branch(estimates, choice, request.max_draft_tokens, wait_ms):
                return ()
        return tuple(estimates.row_costs(MAX_COPY_TOKENS))

    # --- waits ----------------------------------------------------------------------------------------------------

    def wait_for_chain(self, depth: int, now_ns: int, missed: bool = False) -> DrafterWait:
        """Returns the wait for a chain of `depth` tokens after the committed text; `missed`: after a miss."""
        limit_ms = max_wait_ms(self.estimates.draft_ms(depth), self.estimates.verify_ms(1))
        if self.full_depth or not self.estimates.has_drafted:
            limit_ms = max(limit_ms, MAX_FIRST_WAIT_MS)
        return DrafterWait(now_ns, now_ns + int(limit_ms * MILLISECOND_NS), depth=depth, missed=missed)

    def _wait_for_branch(
        self, request: Request, committed: tuple[int, ...], expected_ms: float, now_ns: int, missed: bool = False
    ) -> DrafterWait:
        """Returns a new or continued wait for this outcome's branch to grow, or, if `missed`, to arrive; in all no
        longer than for a whole tree, nor than the next forward of other requests, after which it joins them."""
        e, before = self.estimates, request.round.wait
        limit_ms = max_wait_ms(expected_ms, e.verify_ms(1))
        whole_ms = max_wait_ms((request.plan.depth + 1) * e.depth_ms() + e.link_ms(), e.verify_ms(1))
        if e.active > 1:
            whole_ms = min(whole_ms, e.verify_ms(1))
        if self.full_depth:
            limit_ms = whole_ms = MAX_FIRST_WAIT_MS
        asked_ns, missed = (before.asked_ns, before.missed) if before else (now_ns, missed)
        deadline_ns = min(now_ns + int(limit_ms * MILLISECOND_NS), asked_ns + int(whole_ms * MILLISECOND_NS))
        return DrafterWait(asked_ns, deadline_ns, committed, missed=missed)


class NextRound:
    """Carries the proposer's decisions out, one request at a time: begins the round, prepares for it or waits for it.

    Chains are prepared at the target for likely outcomes, and n-grams for all others, so that neither a hit nor a miss
    costs a message between two verifies; the proposer decides about them as it would after the outcome. A wait for a
    drafter is bounded by its expected time and some slack.
    """

    def __init__(self, workers: WorkerPool, draft_pool: DraftPool, planner: Planner, full_depth: bool) -> None:
        self._workers = workers
        self._draft_pool = draft_pool
        self._planner = planner
        self._proposer = Proposer(planner.estimates, full_depth, lambda: workers.target_abilities.ngrams)

    def open(self, request: Request, offered: bool) -> None:
        """Begins a request, or continues it on a new target: sends OPEN to the target and the drafters, which read the
        committed tokens. The target answers as to an empty chain, unless they are `offered` to a prefill worker."""
        request.round.is_open = True
        self._workers.send_target(open_message(request, offered))
        self._draft_pool.open(request)

    def suspend(self, request: Request) -> None:
        """Drops the round or wait under way, because the target has lost the request; `open` follows."""
        request.round.suspend()
        self._draft_pool.suspend(request)

    def on_outcome(self, settled: SettledRound, now_ns: int) -> None:
        """Ends a round, and begins the next one or a wait, or follows a target that has begun it by itself."""
        request, outcome = settled.request, settled.outcome
        continues = outcome.next_proposal is not None
        request.round.end(settled.proposal, request.draft.covered, continues)
        if not continues or request.admit.mode != "auto":  # in auto a target that continues keeps to the plan it had
            self._planner.replan(request)
        if continues:
            self._on_autonomous_round(request, request.round.advance(outcome, settled.kept), now_ns)
        else:
            self._apply(request, self._proposer.next_step(request, settled.kept, now_ns), now_ns)

    def on_branches(self, request: Request, final: bool, now_ns: int) -> None:
        """Prepares branches, and ends a wait that is over with them; `final`: one drafter has sent all."""
        if final or self._may_be_last_push(request, now_ns):
            self._prepare_branches(request, now_ns)
        wait = request.round.wait
        if wait and wait.outcome:
            self._apply(request, self._proposer.look_up(request, wait.outcome, now_ns), now_ns)

    def on_drafted(self, request: Request, drafter: str, message: Drafted, now_ns: int) -> None:
        """Begins the round that waited for a chain on request."""
        self._verify(request, self._proposer.drafted(request, drafter, message), now_ns)

    def end_wait(self, request: Request, now_ns: int) -> None:
        """Ends the wait if all drafters are done."""
        if request.round.wait and all(state.done for state in request.draft.drafters.values()):
            self._verify(request, self._proposer.after_wait(request), now_ns)

    def send_again(self, request: Request) -> None:
        """Sends the round under way again: the target repeats its answer, continues its work, or answers RESYNC."""
        self._send_verify(request)
        if request.round.halted:
            self._send_halt(request)

    # --- internals ------------------------------------------------------------------------------------------------

    def _apply(self, request: Request, step: Step, now_ns: int) -> None:
        """Begins a round or a wait; a chain is requested by a COMMIT that contains none."""
        if isinstance(step, Proposal):
            self._verify(request, step, now_ns)
            return
        request.round.wait = step
        if step.depth:
            self._draft_pool.request_chain(request, step.depth, now_ns)

    def _verify(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """Begins a round: VERIFY to the target and, in the same flush, COMMIT to the drafters."""
        wait = request.round.wait
        decided = Span(request.sequence.appended_ns, now_ns)
        request.round.begin(proposal.after_wait(wait.missed) if wait else proposal, decided)
        self._send_verify(request)
        self._draft_pool.start_round(request, now_ns)

    def _on_autonomous_round(self, request: Request, proposal: Proposal, now_ns: int) -> None:
        """Follows a target that has begun the next round by itself, and sends HALT if that is to be the last one."""
        request.round.begin(proposal, None if proposal.autonomous else Span(now_ns, now_ns))
        if not proposal.autonomous:
            self._draft_pool.start_round(request, now_ns)
        elif not request.round.halted and (
            self._planner.wants_other_plan(request) or not self._proposer.should_continue(request)
        ):
            request.round.halted = True
            self._send_halt(request)

    def _outcome_in_ms(self, request: Request, now_ns: int) -> float:
        """Returns the time until the outcome of the round under way, by the usual time of its verify."""
        verify_ms = self._planner.estimates.verify_ms(len(request.round.proposal.chain) + 1)
        return max(verify_ms - (now_ns - request.sequence.appended_ns) / MILLISECOND_NS, 0.0)

    def _may_be_last_push(self, request: Request, now_ns: int) -> bool:
        """Whether the outcome of a request that runs alone may come before the next push."""
        estimates = self._planner.estimates
        if estimates.active > 1 or request.round.reads or self._proposer.full_depth:
            return False
        return self._outcome_in_ms(request, now_ns) < MAX_OUTCOME_PUSHES * estimates.depth_ms()

    def _prepare_branches(self, request: Request, now_ns: int) -> None:
        """Prepares chains at the target for outcomes that have a branch and do not end the request, and n-grams for all
        others. A branch that should grow first is prepared only if n-grams would be verified in its place.

        Prepares none during a wait, in a tree with in-process drafts, with a residual q (it would be sent twice), or if
        the policy may have another plan after this round.
        """
        round_ = request.round
        ahead = request.plan.mode == "ssd" and not self._proposer.should_merge_in_process(request)
        if not ahead or round_.wait or request.admit.sampling.is_residual or self._planner.may_replan(request):
            return
        left_ms = self._outcome_in_ms(request, now_ns)
        costs = self._proposer.miss_row_costs(request, left_ms)
        prepared = dict(islice(self._proposer.servable(request, None if costs else left_ms), MAX_BRANCHES))
        round_.prepared |= {(committed, p.chain, p.parents): p for committed, p in prepared.items()}
        chains = prepared.values()
        if chains or costs:
            self._workers.send_target(
                Prepare(
                    request=request.id,
                    epoch=round_.epoch,
                    round=round_.number,
                    base_len=len(request.sequence.tokens),
                    committed=tuple(prepared),
                    chains=tuple(proposal.chain for proposal in chains),
                    parents=tuple(p.parents for p in chains) if any(p.parents for p in chains) else (),
                    row_costs=costs,
                    max_tokens=request.remaining,
                )
            )

    def _send_verify(self, request: Request) -> None:
        """Sends VERIFY with the request's proposal."""
        round_ = request.round
        self._workers.send_target(
            Verify(
                request=request.id,
                epoch=round_.epoch,
                round=round_.number,
                base_len=len(request.sequence.tokens),
                proposal=round_.proposal.to_message(request.remaining),
                all_cores=self._planner.drafters_are_idle(request),
            )
        )

    def _send_halt(self, request: Request) -> None:
        """Sends HALT: the target must not continue by itself."""
        self._workers.send_target(Halt(request=request.id, epoch=request.round.epoch))
