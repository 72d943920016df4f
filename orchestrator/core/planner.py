"""What the rounds learn from, and what follows: the live estimates, the controllers, each request's plan.

The rounds tell it what was sent and what came; it writes nothing down and never sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.orchestrator.core.learning.controller import Controller
from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.learning.forecasts import Plan
from outrider.orchestrator.core.learning.texts import FREE, Drift, TextOdds, Texts
from outrider.orchestrator.core.learning.tuning import Choice, Tuning, nearest
from outrider.orchestrator.core.proposals.proposal import Lookup, Proposal
from outrider.orchestrator.core.proposals.tree import LONGEST_COPY, longest_copy
from outrider.orchestrator.core.request import Foretold, Request, Round, RoundSettings, Waiting
from outrider.orchestrator.events import Admit
from outrider.protocol.abilities import OwnDrafter
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.heads import DRAFT_MODEL, JOINT, NGRAM, is_joint
from outrider.protocol.messages import Branches, Drafted, Outcome, Span

MOST_WISHED = 64


@dataclass(frozen=True, slots=True)
class Means:
    """Who may draft: so many draft `workers`, and `others` without one: drafters of the target's process, n-grams."""

    workers: int
    others: tuple[str, ...] = ()


class Planner:
    """One for all requests, so that what one taught serves the next."""

    def __init__(
        self,
        settings: RoundSettings,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
        own: Callable[[], Iterable[OwnDrafter]] = tuple,
    ) -> None:
        """`tunings` are tune's, `memory` what an earlier server's planner `learned`, `own` the target's drafters."""
        self.estimates = Estimates()
        self.texts = Texts(self.estimates)
        self._own = own
        self._tunings, self._memory = tunings, memory
        for known in (*tunings[:1], *memory[:1]):
            self.estimates.start_from(known)
        self._settings = settings
        self._controllers: dict[tuple[Means, int | None, int | None, bool, str], Controller] = {}
        self._forward_ns = 0
        self._reading = False

    @property
    def trees(self) -> bool:
        """Whether trees of drafts are wanted where they can be verified."""
        return self._settings.trees and not self._settings.full_depth

    def turn_to(self, active: int, reading: bool) -> None:
        """So many requests run at once now; `reading`: the prompt of one of them, at least, is still read."""
        self.estimates.active, self._reading = max(active, 1), reading
        for controller in self._controllers.values():
            controller.turn_to(active, reading)

    def learned(self) -> tuple[Tuning, ...]:
        """What the next server may start from: costs and odds, and by class of temperature what was measured."""
        found = []
        for greedy in (True, False):
            choices = [
                replace(choice, kind=kind)
                for (means, depth, branches, warm, kind), controller in self._controllers.items()
                if means == self._all_means and depth is None and branches is None and warm != greedy
                for choice in controller.learned()
            ]
            known = next((record for record in self._memory if record.is_greedy == greedy), None)
            choices = choices or list(known.choices if known is not None else ())
            if choices:
                best_first = sorted(choices, key=lambda choice: -choice.tokens_per_second)
                found.append(self.estimates.told(tuple(best_first), 0.0 if greedy else 1.0))
        return tuple(found)

    # --- plans ----------------------------------------------------------------------------------------------------

    def first_plan(self, admit: Admit, drafters: int, kind: str = FREE) -> tuple[Plan, list[str]]:
        """How the rounds of a request about this kind of text are made with so many draft workers, and the reason when
        speculation is off."""
        means = self._means(admit, drafters)
        if admit.mode == "auto":
            return self._controller(admit, means, kind).plan(), []
        return self._fixed_plan(admit, means)

    def _fixed_plan(self, admit: Admit, means: Means) -> tuple[Plan, list[str]]:
        """Draft workers go before the drafters of the target's process where nobody is named, these before n-grams."""
        depth, branches = self._depth(admit), self._branches(admit, means.workers)
        if admit.mode == "ar" or means.workers:
            joint = admit.mode == "ssd" and is_joint(admit.drafter) and means.others
            return Plan(admit.mode, depth, branches, means.others[0] if joint else ""), []
        if means.others:
            return Plan("sd", depth, branches, means.others[0]), []
        if self._settings.ngrams:
            return Plan(admit.mode, depth, branches), []
        return Plan("ar", depth, branches), ["speculation is off: there is no drafter"]

    def regain(self, request: Request) -> None:
        """There is another set of drafters than the request began with."""
        if request.admit.mode != "auto":
            request.plan, _ = self._fixed_plan(request.admit, self._means_of(request))

    def replan(self, request: Request) -> None:
        """In `auto` the controller may change its mind between two rounds."""
        if request.admit.mode == "auto":
            request.plan = self._controller_of(request).plan()

    def wants_other(self, request: Request) -> bool:
        """Whether, in `auto`, a target that goes on by itself is to stop: the controller has another plan."""
        return request.admit.mode == "auto" and self._controller_of(request).plan() != request.plan

    def may_replan(self, request: Request) -> bool:
        """Whether the controller may have another plan after the round under way."""
        if request.admit.mode != "auto":
            return False
        controller = self._controller_of(request)
        return controller.is_due or controller.plan() != request.plan

    def reason(self, request: Request) -> str | None:
        """The controller's latest reason, for a request in `auto`."""
        if request.admit.mode != "auto":
            return None
        return f"auto: {self._controller_of(request).why}"

    # --- what was sent and what came ------------------------------------------------------------------------------

    def missed(self, request: Request) -> None:
        """A lookup found nothing, and a drafter was asked."""
        self.estimates.saw_lookup(False, request.covered)

    def proposed(self, request: Request) -> None:
        lookup = request.proposal.lookup
        if lookup is not Lookup.NONE:
            # Late or not: `proposer` says whether that is worth a wait.
            self.estimates.saw_lookup(lookup.found, request.covered)

    def branches(self, request: Request, message: Branches, now_ns: int) -> None:
        """A push of the quickest. In company a request's trees wait for the others': what counts is the time since the
        last one."""
        if not message.entries:
            return
        work_ms = _milliseconds(message.work)
        if self.estimates.active == 1:
            self.estimates.saw_depth(len(message.entries), work_ms)
        elif request.cache.pushes > 1:
            since_ms = (now_ns - request.branches_at_ns) / MILLISECOND_NS
            self.estimates.saw_depth(len(message.entries), max(since_ms, work_ms))

    def drafted(self, message: Drafted, waiting: Waiting, now_ns: int) -> None:
        work_ms = _milliseconds(message.work)
        self.estimates.saw_draft(len(message.chain), work_ms)
        self.estimates.saw_link((now_ns - waiting.asked_ns) / MILLISECOND_NS - work_ms)

    def outcome(self, request: Request, ended: Round, outcome: Outcome, kept: tuple[int, ...], now_ns: int) -> None:
        """What a round that made `kept` final says about costs and odds; nothing where the whole text was read."""
        self._judge_copy(request, ended.proposal, outcome, kept)
        round_ms, request.handled_ns = (now_ns - request.handled_ns) / MILLISECOND_NS, now_ns
        if ended.read:
            return
        proposal, estimates = ended.proposal, self.estimates
        estimates.saw_round(len(kept), round_ms)
        if proposal.going_on and not proposal.draft:
            if round_ms > 0:  # outcomes that are heard together say nothing of the time between them
                estimates.saw_plain(max(outcome.rows, 1), round_ms)
        elif ended.plan.mode != "ar":
            self._saw_forward(len(proposal.chain) + 1, outcome)
            along = proposal.along(proposal.nodes(outcome) or ())
            if self._judges(request):
                self.texts.saw_chain(request.text, proposal.drafter if proposal.draft else "", len(proposal.own), along)
            if not proposal.draft:
                estimates.saw_chain(len(proposal.own), along)
            elif proposal.chain and outcome.drafting is not None:
                drafting_ms = _milliseconds(outcome.drafting)
                estimates.saw_own(proposal.drafter, len(proposal.own), along, drafting_ms)
        if proposal.lookup is Lookup.HIT:
            estimates.saw_turnaround(outcome.idle_ns / MILLISECOND_NS)
        if request.admit.mode == "auto" and ended.number > 1:  # the first may have waited for a prompt
            self._controller_of(request).saw_round(ended.plan, len(kept), round_ms)

    def _judges(self, request: Request) -> bool:
        """Whether it matters which kind its text is of."""
        return request.admit.mode == "auto" and self.estimates.active == 1

    def judge_own(self, request: Request, ended: Round, outcome: Outcome) -> None:
        """Leaves a drafter of the target's process that is of no use any more out of the request, and says so."""
        drafter = ended.proposal.drafter
        if not ended.proposal.draft or drafter in request.left_out or request.remaining < ended.plan.depth:
            return
        why = request.drifts.setdefault(drafter, Drift()).saw(ended.proposal.depth, outcome.accepted)
        if why:
            request.left_out.add(drafter)
            request.note(f"speculation: {drafter} is not used: {why}")
            self.regain(request)

    def _judge_copy(self, request: Request, proposal: Proposal, outcome: Outcome, kept: tuple[int, ...]) -> None:
        """Every round shows what a copy would have been worth in it, whatever was verified."""
        foretold = request.foretold
        if foretold is not None and foretold.base_len == outcome.base_len:
            held = self.estimates.saw_copy(foretold.copy, kept)
            if self._judges(request):
                self.texts.saw_copy(request.text, min(len(foretold.copy.chain), len(kept)), held)
            own, copy = proposal.own, foretold.copy
            if own and copy.chain and proposal.chain[own[0]] != copy.chain[0]:
                self.estimates.saw_beside(copy, kept)
        if not request.ngrams.is_empty:
            request.foretold = Foretold(len(request.tokens), longest_copy(request.ngrams, LONGEST_COPY))

    def _saw_forward(self, own: int, outcome: Outcome) -> None:
        """One forward brings an outcome to each that had a part in it, and is counted once."""
        if outcome.work.ended_ns != self._forward_ns:
            self._forward_ns = outcome.work.ended_ns
            self.estimates.saw_verify(max(outcome.rows, own), _milliseconds(outcome.work), own)

    # --- controllers ----------------------------------------------------------------------------------------------

    def _means_of(self, request: Request) -> Means:
        return self._means(request.admit, len(request.drafters), request.left_out)

    def _means(self, admit: Admit, workers: int, left_out: Collection[str] = ()) -> Means:
        """Who may draft for a request; where it names one, only that one."""
        own = tuple(self._own())
        self.estimates.meet(own)
        others = tuple(one.name for one in own if one.name not in left_out)
        others += (NGRAM,) if self._settings.ngrams and (own or admit.drafter == NGRAM) else ()
        if admit.drafter:
            named = admit.drafter.split(JOINT)
            others = tuple(name for name in others if name in named)
            workers = workers if DRAFT_MODEL in named else 0
        return Means(workers, others)

    @property
    def _all_means(self) -> Means:
        """Those that the cluster begins with."""
        others = tuple(one.name for one in self._own())
        return Means(self._settings.drafters, (*others, NGRAM) if others and self._settings.ngrams else others)

    def _controller_of(self, request: Request) -> Controller:
        return self._controller(request.admit, self._means_of(request), request.text.kind, request.text.odds)

    def _controller(self, admit: Admit, means: Means, kind: str = FREE, odds: TextOdds | None = None) -> Controller:
        """One for each set of means and class of temperature: what was learned with others would mislead. So it would
        of other kinds of text; in company all follow one plan, whatever they are about."""
        kind = kind if self.estimates.active == 1 else FREE
        key = (means, admit.num_draft_tokens, admit.branches, admit.sampling.temp > 0, kind)
        if key not in self._controllers:
            copies = self._settings.ngrams and not means.others
            modes = ("ar", "sd", "ssd") if means.workers else ("ar", "sd") if copies else ("ar",)
            fixed = admit.branches is not None
            branches = self._branches(admit, means.workers)
            controller = Controller(self.estimates, modes, self._depth(admit), branches, fixed, means.others)
            controller.turn_to(self.estimates.active, self._reading)
            for known in (self._tunings, self._memory) if means.workers or means.others else ():
                record = nearest(known, admit.sampling.temp)
                if record is not None and (known is self._tunings or record.is_greedy == (admit.sampling.temp == 0)):
                    choices = [choice for choice in record.choices if _may_have(admit, choice)]
                    controller.start_from(_of_kind(choices, kind))
            if kind and (like := self._controllers.get((*key[:-1], FREE))) is not None and not controller.knows:
                controller.start_like(like)
            self._controllers[key] = controller
            self._forget_wished()
        self._controllers[key].odds = odds or self.texts.odds(kind, admit.sampling.temp == 0)
        return self._controllers[key]

    def _forget_wished(self) -> None:
        """Of those for a K or a B that requests asked for the oldest go: there are as many as anybody thinks of."""
        wished = [key for key in self._controllers if key[1:3] != (None, None)]
        for key in wished[:-MOST_WISHED]:
            del self._controllers[key]

    def _depth(self, admit: Admit) -> int:
        return admit.num_draft_tokens or self._settings.depth

    def _branches(self, admit: Admit, drafters: int) -> int:
        """Where nobody says how many, as many for each drafter."""
        each = max(drafters, 1) if self._settings.each else 1
        return admit.branches or self._settings.branches * each


def _of_kind(choices: Sequence[Choice], kind: str) -> Sequence[Choice]:
    """What is known of this kind of text, or else of texts in general."""
    return [one for one in choices if one.kind == kind] or [one for one in choices if one.kind == FREE]


def _may_have(admit: Admit, choice: Choice) -> bool:
    """Whether the request leaves K and B open, or to be what was tuned."""
    fits_depth = admit.num_draft_tokens is None or choice.depth <= admit.num_draft_tokens
    return fits_depth and (admit.branches is None or choice.mode != "ssd" or choice.branches == admit.branches)


def _milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / MILLISECOND_NS
