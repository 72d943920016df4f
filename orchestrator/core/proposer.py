"""What a request verifies next, and what after a miss: the one place where AR, SD and SSD differ.

`Proposer`: decides by the request, the estimates and the time. Sends nothing.

`Fallback`: what to verify after a miss, and whether a hit should wait to grow: expected tokens minus the worth of the
time. A millisecond of the target is worth the tokens that all requests have lately brought in one; a millisecond of a
request's waiting is worth its own. Pure functions of the estimates: no clock, no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import (
    CopiedTail,
    Lookup,
    Proposal,
    ProposalSource,
    beside_own,
    best_tail,
    copied,
    filled,
    longest_copy,
    merged,
    unites,
    worth_telling,
)
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.speculation_cache import CachedBranch
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Alternatives, Drafted
from outrider.protocol.trees import SparseQ


@dataclass(frozen=True, slots=True)
class Fallback:
    """Verify what can be copied now (nothing: an AR step), or ask the drafter for `wait_for` tokens first, or let the
    target's own draft `own`. `value`: the tokens that brings less the worth of its time."""

    wait_for: int = 0
    value: float = 0.0
    own: int = 0


def after_miss(estimates: Estimates, tail: CopiedTail, longest: int, has_drafter: bool, own: str = "") -> Fallback:
    """The best of: an AR step, what is worth copying, the drafter's just-in-time chain of any length, a chain of the
    target's `own` drafter, if it has one for this."""
    best = Fallback(value=_alone(estimates, tail))
    for length in range(1, longest + 1 if own else 1):
        value = _of_own(estimates, length, own)
        if value > best.value:
            best = Fallback(own=length, value=value)
    for length in range(1, longest + 1 if has_drafter else 1):
        value = _asked(estimates, length)
        if value > best.value:
            best = Fallback(wait_for=length, value=value)
    return best


def worth_hoping(estimates: Estimates, alternative: Fallback, longest: int, wait_ms: float) -> bool:
    """Whether an outcome whose branches are still on their way should wait `wait_ms` for them, as likely a hit as any.

    Without this a branch that comes a moment after its outcome is lost, and with a slow drafter or a long way to it
    those are the branches of full acceptance, round after round.
    """
    hit = max(
        estimates.drafted.expected_tokens(depth)
        - estimates.tokens_per_ms() * estimates.verify_ms(depth + 1)
        - estimates.request_tokens_per_ms() * (depth - 1) * estimates.depth_ms()
        for depth in range(1, longest + 1)
    )
    waiting = estimates.request_tokens_per_ms() * estimates.wait_ms(wait_ms)
    return estimates.hit_rate() * (hit - alternative.value) > waiting


def drafts_better(estimates: Estimates, tail: CopiedTail, longest: int, drafter: str = "") -> bool:
    """Whether a drafter's chain of `longest` is worth asking for when this can be copied for nothing (SD)."""
    return not tail.tokens or _asked(estimates, longest, drafter) > _alone(estimates, tail)


def worth_waiting(estimates: Estimates, depth: int, longest: int, since_last_ms: float) -> bool:
    """Whether a hit of `depth` tokens should wait for one more, the last having come `since_last_ms` ago."""
    if depth >= longest:
        return False
    waiting = estimates.request_tokens_per_ms() * estimates.wait_ms(max(estimates.depth_ms() - since_last_ms, 0.0))
    row = estimates.tokens_per_ms() * (estimates.verify_ms(depth + 2) - estimates.verify_ms(depth + 1))
    return estimates.drafted.reach(depth) > waiting + row


def _alone(estimates: Estimates, tail: CopiedTail) -> float:
    """What a step brings, with what can be copied behind it, less the worth of its forward."""
    return 1.0 - estimates.tokens_per_ms() * estimates.verify_ms(1) + tail.gain


def _asked(estimates: Estimates, length: int, drafter: str = "") -> float:
    """What a chain that is asked for brings, less the worth of its forward and of the wait."""
    forward = estimates.tokens_per_ms() * estimates.verify_ms(length + 1)
    waiting = estimates.request_tokens_per_ms() * estimates.wait_ms(estimates.draft_ms(length, drafter))
    return estimates.holding(drafter).expected_tokens(length) - forward - waiting


def _of_own(estimates: Estimates, length: int, own: str) -> float:
    """What a chain of the target's own drafter brings, less the worth of its forward and its drafting; and of the next
    chain's: no branch is prepared behind this one, which the draft workers do not know."""
    drafting = estimates.tokens_per_ms() * estimates.in_process_ms(length, own)
    forward = estimates.tokens_per_ms() * estimates.verify_ms(length + 1)
    holding = estimates.holding(own)
    next_time = estimates.hit_rate() * holding.reach(0) * drafting
    return holding.expected_tokens(length) - forward - drafting - next_time


def longest_wait_ms(expected_ms: float) -> float:
    """Any wait for a drafter is bounded: three times what it should take, then the target goes on alone."""
    return 3.0 * expected_ms + 1.0


@dataclass(frozen=True, slots=True)
class AskDrafters:
    """Ask the drafters for the continuation of the committed text, `depth` tokens; `missed`: a lookup found nothing."""

    depth: int
    missed: bool = False


@dataclass(frozen=True, slots=True)
class WaitForBranch:
    """Wait for this outcome's branch to grow, or, `missed`, to come at all, for about `milliseconds`."""

    committed: tuple[int, ...]
    milliseconds: float
    missed: bool = False


Step = Proposal | AskDrafters | WaitForBranch


@dataclass(frozen=True, slots=True)
class Proposer:
    """Decides by the mode of the request. `full_depth`: a round's branches are waited for until all are complete."""

    estimates: Estimates
    full_depth: bool

    def after(self, request: Request, committed: tuple[int, ...], room: int, now_ns: int) -> Step:
        """The step after the outcome that made `committed` final; a chain has room for so many tokens."""
        if request.mode == "ar":
            return Proposal(autonomous=True)
        if room < 1:
            return Proposal()
        if request.mode == "ssd" and request.drafters:
            return self.serve(request, committed, room, now_ns)
        tail = best_tail(self.estimates, longest_copy(request.ngrams, room))
        drafter = request.plan.drafter
        if drafter == NGRAM or not (drafter or request.drafters):
            return copied(tail)
        longest = min(request.depth, room)
        if not self._is_fixed(request) and not drafts_better(self.estimates, tail, longest, drafter):
            return copied(tail)
        if drafter:
            copy = self._beside_in_process(request, room)
            return (
                self._in_process(request, copied(CopiedTail(copy)))
                if copy
                else replace(self._in_process(request), autonomous=True)
            )
        return AskDrafters(longest)

    def _in_process(self, request: Request, beside: Proposal | None = None, depth: int = 0) -> Proposal:
        """What the plan's drafter in the target's process is to say, and what stands `beside` it; `depth` tokens, or as
        many as the plan has."""
        drafter, told = request.plan.drafter, beside or Proposal()
        source = ProposalSource.HEAD if self.estimates.is_head(drafter) else ProposalSource.DRAFTER
        return replace(
            told,
            source=source,
            draft=depth or request.depth,
            drafter=drafter,
            min_prob=worth_telling(self.estimates, request.takes_trees),
            by=told.origins(range(len(told.chain)))[:-1],
            copied=0,
        )

    def _beside_in_process(self, request: Request, room: int) -> tuple[int, ...]:
        """What the text says comes next, as far as that pays beside an own drafter's chain."""
        if not request.takes_trees or request.ngrams.is_empty:
            return ()
        copy = longest_copy(request.ngrams, room)
        return beside_own(self.estimates, copy, request.plan.drafter, min(request.depth, room))

    def unites(self, request: Request) -> bool:
        """Whether what is prepared for it elsewhere stands in one tree with what the target drafts for itself."""
        return (
            bool(request.in_process_drafter)
            and request.takes_trees
            and unites(self.estimates, request.in_process_drafter, request.depth)
        )

    def stays(self, request: Request, room: int) -> bool:
        """Whether a target that goes on by itself is to: not where what its drafter says can be copied for nothing, nor
        plainly where a drafter has come meanwhile."""
        if not request.proposal.draft:
            return request.mode == "ar"
        if request.proposal.drafter in request.left_out:
            return False
        if request.ngrams.is_empty or self._is_fixed(request) or room < 1:
            return True
        if self._beside_in_process(request, room):
            return False
        tail = best_tail(self.estimates, longest_copy(request.ngrams, room))
        return drafts_better(self.estimates, tail, min(request.depth, room), request.proposal.drafter)

    def branch(self, request: Request, found: CachedBranch, room: int, committed: tuple[int, ...] = ()) -> Proposal:
        """A branch as the chain to verify after `committed` tokens that are still to come, filled from the text."""
        chain = found.chain[: max(min(request.depth, room), 0)]
        hit = Proposal(chain, ProposalSource.CACHE, Lookup.HIT, q=_first(found.q, chain), drafter=found.drafter)
        return self._filled(request, hit, room, committed, found.alternatives)

    def drafted(self, request: Request, drafter: str, message: Drafted, room: int) -> Proposal:
        """A just-in-time chain, filled from the text."""
        chain = message.chain[: max(min(request.depth, room), 0)]
        source = ProposalSource.DRAFTER if chain else ProposalSource.NONE
        found = Proposal(chain, source, q=_first(message.q, chain), drafter=drafter)
        return self._filled(request, found, room, (), message.alternatives)

    def as_it_is(self, request: Request, room: int) -> Proposal:
        """Instead of a wait that has ended: the branch that it was for, as deep as it has come, or nothing."""
        outcome = request.wait.outcome if request.wait else None
        found = request.cache.lookup(outcome) if outcome else None
        return self.branch(request, found, room) if found else Proposal()

    def _filled(
        self, request: Request, chain: Proposal, room: int, committed: tuple[int, ...], beside: Alternatives | None
    ) -> Proposal:
        """Not where rounds are to be reproducible, nor behind a chain that comes with its q."""
        if self.full_depth or request.admit.sampling.is_residual:
            return chain
        if request.takes_trees:
            tree = merged(self.estimates, request.ngrams, chain, committed, room, beside)
            if tree is not None:
                return tree
        return chain if request.ngrams.is_empty else filled(self.estimates, request.ngrams, chain, committed, room)

    def serve(self, request: Request, committed: tuple[int, ...], room: int, now_ns: int) -> Step:
        """The lookup. A hit is served as deep as it has come, unless one more token is worth its wait."""
        cache = request.cache
        found = cache.lookup(committed)
        if self.full_depth and not cache.final:
            return WaitForBranch(committed, request.depth * self.estimates.depth_ms(), missed=found is None)
        since_ms = (now_ns - request.branches_at_ns) / MILLISECOND_NS
        if found is None:
            return self._without(request, committed, room, since_ms)
        hit = self.branch(request, found, room)
        if self.unites(request):
            return self._in_process(request, hit)
        longest = min(request.depth, room)
        grows = cache.grows(found) and found.drafter == cache.lead and not hit.copied
        if grows and worth_waiting(self.estimates, len(found.chain), longest, since_ms):
            return WaitForBranch(committed, self.estimates.depth_ms())
        return hit

    def _is_fixed(self, request: Request) -> bool:
        """Full depth makes residual texts reproducible: then no estimate may decide what is verified."""
        return self.full_depth and request.admit.sampling.is_residual

    def _without(self, request: Request, committed: tuple[int, ...], room: int, since_ms: float) -> Step:
        """No branch for this outcome: a miss, unless such branches are still on their way and worth their wait."""
        longest = min(request.depth, room)
        if self._is_fixed(request) and request.drafters:
            return AskDrafters(longest, missed=True)
        tail = best_tail(self.estimates, longest_copy(request.ngrams, room))
        choice = after_miss(self.estimates, tail, longest, bool(request.drafters), request.in_process_drafter)
        line = request.proposal.line
        beside = committed[:-1] != line[: len(committed) - 1]  # what follows a sibling comes with the sibling's branch
        pushes = 0 if beside else request.cache.pushes_until(len(committed) - 1, len(line))
        if pushes and request.drafters:
            expected_ms = pushes * self.estimates.depth_ms()
            expected_ms += self.estimates.link_ms() if not request.cache.pushes else 0.0
            # What is overdue is expected to stay away as long again.
            wait_ms = abs(expected_ms - since_ms)
            if worth_hoping(self.estimates, choice, longest, wait_ms):
                return WaitForBranch(committed, wait_ms, missed=True)
        if choice.wait_for:
            return AskDrafters(choice.wait_for, missed=True)
        if choice.own:
            copy = replace(copied(CopiedTail(self._beside_in_process(request, room))), lookup=Lookup.MISS)
            return self._in_process(request, copy, choice.own)
        return replace(copied(tail), lookup=Lookup.MISS)


def _first(q: SparseQ | None, chain: tuple[int, ...]) -> SparseQ | None:
    return q.part(0, len(chain)) if q is not None else None
