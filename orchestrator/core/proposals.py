"""What a request verifies next: the one place where AR, SD and SSD differ.

Pure decisions over a request, the estimates and the time; nothing is sent from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.orchestrator.core.controller import EPISODE_ROUNDS, NOTICE_ROUNDS, TRY_ROUNDS
from outrider.orchestrator.core.copies import best_tail, copied, filled, longest_copy
from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.fallback import after_miss, drafts_better, worth_hoping, worth_waiting
from outrider.orchestrator.core.proposal import Proposal, Source
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.speculation_cache import Prepared
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Drafted
from outrider.protocol.sparse import SparseQ


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the drafters for the continuation of the committed text, `depth` tokens. `missed`: the lookup found nothing.
    """

    depth: int
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Linger:
    """Wait for this outcome's branch to grow, or, `missed`, to come at all, for about `milliseconds`."""

    accepted: int
    bonus: int
    milliseconds: float
    missed: bool = False


Step = Proposal | Ask | Linger


@dataclass(frozen=True, slots=True)
class Proposer:
    """Decides by the mode of the request. `full_depth`: a round's branches are waited for until all are complete.

    `colocated`: the target drafts for itself.
    """

    estimates: Estimates
    full_depth: bool
    colocated: bool = False

    def after(self, request: Request, accepted: int, bonus: int, room: int, now_ns: int) -> Step:
        """The step after the outcome (accepted, bonus); a chain has room for so many tokens."""
        if request.mode == "ar":
            return Proposal(run_ahead=_ahead(request))
        if room < 1:
            return Proposal()
        copy = longest_copy(request.ngrams, room)
        tail = best_tail(self.estimates, copy)
        if not request.drafters and not self.colocated:
            return copied(copy, tail)
        if request.mode == "sd":
            longest = min(request.depth, room)
            if not self._is_fixed(request) and not drafts_better(self.estimates, tail, longest):
                return copied(copy, tail)
            return self._own(request) if self.colocated else Ask(longest)
        return self.serve(request, accepted, bonus, room, now_ns)

    def branch(self, request: Request, found: Prepared, room: int, committed: tuple[int, ...] = ()) -> Proposal:
        """A branch as the chain to verify after `committed` tokens that are still to come, filled from the text."""
        chain = found.chain[: max(min(request.depth, room), 0)]
        hit = Proposal(chain, Source.CACHE, found=True, q=_first(found.q, chain))
        return self._filled(request, hit, room, committed)

    def drafted(self, request: Request, message: Drafted, room: int) -> Proposal:
        """A just-in-time chain, filled from the text."""
        chain = message.chain[: max(min(request.depth, room), 0)]
        source = Source.DRAFTER if chain else Source.NONE
        return self._filled(request, Proposal(chain, source, q=_first(message.q, chain)), room, ())

    def _filled(self, request: Request, chain: Proposal, room: int, committed: tuple[int, ...]) -> Proposal:
        """Not where rounds are to be reproducible, nor behind a chain that comes with its q."""
        if self.full_depth or request.admit.sampling.is_residual or request.ngrams.is_empty:
            return chain
        return filled(self.estimates, request.ngrams, chain, committed, room)

    def serve(self, request: Request, accepted: int, bonus: int, room: int, now_ns: int) -> Step:
        """The lookup. A hit is served as deep as it has come, unless one more token is worth its wait."""
        cache = request.cache
        found = cache.lookup(accepted, bonus)
        if self.full_depth and not cache.final:
            return Linger(accepted, bonus, request.depth * self.estimates.depth_ms(), missed=found is None)
        since_ms = (now_ns - request.branches_at_ns) / MILLISECOND_NS
        if found is None:
            return self._without(request, accepted, bonus, room, since_ms)
        hit = self.branch(request, found, room)
        longest = min(request.depth, room)
        grows = not cache.final and not hit.copied
        if grows and worth_waiting(self.estimates, len(found.chain), longest, since_ms):
            return Linger(accepted, bonus, self.estimates.depth_ms())
        return hit

    def _own(self, request: Request) -> Proposal:
        """The target's own chain, and as many more of them, unasked, as it has lately gone without n-grams.

        Between them there is no looking for n-grams that would be better. Where none are looked for it goes on.
        """
        ahead = _ahead(request)
        if request.ngrams.is_empty or self._is_fixed(request):
            return Proposal(source=Source.DRAFTER, run_ahead=ahead, draft=request.depth)
        ahead = min(request.round - request.copied_in, EPISODE_ROUNDS - 1, ahead)
        return Proposal(source=Source.DRAFTER, run_ahead=ahead, draft=request.depth)

    def _is_fixed(self, request: Request) -> bool:
        """Full depth makes residual texts reproducible: then no estimate may decide what is verified."""
        return self.full_depth and request.admit.sampling.is_residual

    def _without(self, request: Request, accepted: int, bonus: int, room: int, since_ms: float) -> Step:
        """No branch for this outcome: a miss, unless such branches are still on their way and worth their wait."""
        longest = min(request.depth, room)
        if self._is_fixed(request) and request.drafters:
            return Ask(longest, missed=True)
        copy = longest_copy(request.ngrams, room)
        tail = best_tail(self.estimates, copy)
        choice = after_miss(self.estimates, tail, longest, bool(request.drafters))
        pushes = request.cache.pushes_until(accepted, len(request.proposal.chain))
        if pushes and request.drafters:
            expected_ms = pushes * self.estimates.depth_ms()
            expected_ms += self.estimates.link_ms() if not request.cache.pushes else 0.0
            # What is overdue is expected to stay away as long again.
            wait_ms = abs(expected_ms - since_ms)
            if worth_hoping(self.estimates, choice, longest, wait_ms):
                return Linger(accepted, bonus, wait_ms, missed=True)
        if choice.wait_for:
            return Ask(choice.wait_for, missed=True)
        return replace(copied(copy, tail), missed=True)


def _ahead(request: Request) -> int:
    """How far the target may go on by itself: nothing else can be proposed before it is through.

    In `auto` far enough for a try; if that goes on, so does the target (`Ledger.prolonged`).
    """
    wanted = max(request.remaining - 1, 0)
    return min(wanted, TRY_ROUNDS + 2 + NOTICE_ROUNDS) if request.admit.mode == "auto" else wanted


def _first(q: SparseQ | None, chain: tuple[int, ...]) -> SparseQ | None:
    return q.part(0, len(chain)) if q is not None else None
