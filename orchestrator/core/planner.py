"""What the rounds teach, and what follows: the live estimates, the policies, and each request's plan.

The scheduler reports what was sent and what came. Sends nothing and records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecasts, RoundPlan
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.text_profiles import FREE, Drift, TextAcceptance, TextProfiles
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning, nearest
from outrider.orchestrator.core.proposal import LONGEST_COPY, Lookup, Proposal, longest_copy
from outrider.orchestrator.core.request import DrafterWait, PendingCopy, Request, RoundSettings, RoundSnapshot
from outrider.orchestrator.events import Admit
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.heads import DRAFT_MODEL, JOINT, NGRAM, is_joint
from outrider.protocol.messages import Branches, Drafted, InProcessDrafter, Outcome, Span

MOST_WISHED = 64
# How often, in rounds, SSD with an open B asks the formula for it: the answer takes 0.1 ms.
BREADTH_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class DraftSources:
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
        own: Callable[[], Iterable[InProcessDrafter]] = tuple,
    ) -> None:
        """`tunings` are tune's, `memory` what an earlier server's planner `learned`, `own` the target's drafters."""
        self.estimates = Estimates()
        self.profiles = TextProfiles(self.estimates)
        self._own = own
        self._tunings, self._stored = tunings, memory
        for known in (*tunings[:1], *memory[:1]):
            self.estimates.start_from(known)
        self._settings = settings
        self._policies: dict[tuple[DraftSources, int | None, int | None, bool, str], Policy] = {}
        self._forward_ns = 0
        self._reading = False

    @property
    def trees(self) -> bool:
        """Whether trees of drafts are wanted where they can be verified."""
        return self._settings.trees and not self._settings.full_depth

    def set_load(self, active: int, reading: bool) -> None:
        """So many requests run at once now; `reading`: the prompt of one of them, at least, is still read."""
        self.estimates.active, self._reading = max(active, 1), reading
        for policy in self._policies.values():
            policy.set_load(active, reading)

    def learned(self) -> tuple[Tuning, ...]:
        """What the next server may start from: costs and odds, and by class of temperature what was measured."""
        found = []
        for greedy in (True, False):
            choices = [
                replace(choice, kind=kind)
                for (means, depth, branches, warm, kind), policy in self._policies.items()
                if means == self._all_sources and depth is None and branches is None and warm != greedy
                for choice in policy.learned()
            ]
            known = next((record for record in self._stored if record.is_greedy == greedy), None)
            choices = choices or list(known.choices if known is not None else ())
            if choices:
                best_first = sorted(choices, key=lambda choice: -choice.tokens_per_second)
                found.append(self.estimates.snapshot(tuple(best_first), 0.0 if greedy else 1.0))
        return tuple(found)

    # --- plans ----------------------------------------------------------------------------------------------------

    def first_plan(self, admit: Admit, drafters: int, kind: str = FREE) -> tuple[RoundPlan, list[str]]:
        """How the rounds of a request about this kind of text are made with so many draft workers, and the reason when
        speculation is off."""
        means = self._sources(admit, drafters)
        if admit.mode == "auto":
            return self._policy(admit, means, kind).plan(), []
        return self._fixed_plan(admit, means)

    def _fixed_plan(self, admit: Admit, means: DraftSources) -> tuple[RoundPlan, list[str]]:
        """Where none is named, draft workers go before the drafters of the target's process, these before n-grams."""
        depth, branches = self._depth(admit), self._branches(admit, means.workers)
        if admit.mode == "ar" or means.workers:
            joint = admit.mode == "ssd" and is_joint(admit.drafter) and means.others
            return RoundPlan(admit.mode, depth, branches, means.others[0] if joint else ""), []
        if means.others:
            return RoundPlan("sd", depth, branches, means.others[0]), []
        if self._settings.ngrams:
            return RoundPlan(admit.mode, depth, branches), []
        return RoundPlan("ar", depth, branches), ["speculation is off: there is no drafter"]

    def on_drafter_rejoined(self, request: Request) -> None:
        """There is another set of drafters than the request began with."""
        if request.admit.mode != "auto":
            request.plan, _ = self._fixed_plan(request.admit, self._sources_of(request))

    def replan(self, request: Request) -> None:
        """Between two rounds: in `auto` the policy's plan; in SSD the B that the drafter can finish, if B is open."""
        if request.admit.mode == "auto":
            request.plan = self._policy_of(request).plan()
        elif request.mode == "ssd" and request.round % BREADTH_ROUNDS == 0 and self._is_breadth_open(request.admit):
            request.plan = replace(request.plan, branches=self._breadth(request))

    def _is_breadth_open(self, admit: Admit) -> bool:
        return admit.branches is None and self._settings.each and not self._settings.full_depth

    def _breadth(self, request: Request) -> int:
        """The number of outcomes to prepare that brings the most tokens at this K."""
        most = self._branches(request.admit, self._sources_of(request).workers)
        formula = Forecasts(self.estimates, request.text.odds, self.estimates.active, request.depth, most, fixed=False)
        return formula.of(Arm("ssd", request.depth))[0].branches

    def wants_other(self, request: Request) -> bool:
        """Whether, in `auto`, a target that goes on by itself is to stop: the controller has another plan."""
        return request.admit.mode == "auto" and self._policy_of(request).plan() != request.plan

    def may_replan(self, request: Request) -> bool:
        """Whether the controller may have another plan after the round under way."""
        if request.admit.mode != "auto":
            return False
        policy = self._policy_of(request)
        return policy.is_due or policy.plan() != request.plan

    def reason(self, request: Request) -> str | None:
        """The controller's latest reason, for a request in `auto`."""
        if request.admit.mode != "auto":
            return None
        return f"auto: {self._policy_of(request).why}"

    # --- what was sent and what came ------------------------------------------------------------------------------

    def on_missed(self, request: Request) -> None:
        """A lookup found nothing, and a drafter was asked."""
        self.estimates.observe_lookup(False, request.covered)

    def on_proposed(self, request: Request) -> None:
        lookup = request.proposal.lookup
        if lookup is not Lookup.NONE:
            # Late or not: `proposer` says whether that is worth a wait.
            self.estimates.observe_lookup(lookup.found, request.covered)

    def on_branches(self, request: Request, message: Branches, now_ns: int) -> None:
        """A push of the quickest. With other requests a request's trees wait for the others': what counts is the time
        since the last one."""
        if not message.entries:
            return
        work_ms = _milliseconds(message.work)
        if self.estimates.active == 1:
            self.estimates.observe_depth(len(message.entries), work_ms)
        elif request.cache.pushes > 1:
            since_ms = (now_ns - request.branches_at_ns) / MILLISECOND_NS
            self.estimates.observe_depth(len(message.entries), max(since_ms, work_ms))

    def on_drafted(self, message: Drafted, waiting: DrafterWait, now_ns: int) -> None:
        work_ms = _milliseconds(message.work)
        self.estimates.observe_draft(len(message.chain), work_ms)
        self.estimates.observe_link((now_ns - waiting.asked_ns) / MILLISECOND_NS - work_ms)

    def on_outcome(
        self, request: Request, ended: RoundSnapshot, outcome: Outcome, kept: tuple[int, ...], now_ns: int
    ) -> None:
        """What a round that made `kept` final says about costs and odds; nothing where the whole text was read."""
        self._judge_copy(request, ended.proposal, outcome, kept)
        round_ms, request.handled_ns = (now_ns - request.handled_ns) / MILLISECOND_NS, now_ns
        if ended.read:
            return
        proposal, estimates = ended.proposal, self.estimates
        estimates.observe_round(len(kept), round_ms)
        if proposal.autonomous and not proposal.draft:
            if round_ms > 0:  # outcomes that are heard together say nothing of the time between them
                estimates.observe_plain(max(outcome.rows, 1), round_ms)
        elif ended.plan.mode != "ar":
            self._observe_forward(len(proposal.chain) + 1, outcome)
            along = proposal.along(proposal.nodes(outcome) or ())
            if self._can_judge(request):
                self.profiles.observe_chain(
                    request.text, proposal.drafter if proposal.draft else "", len(proposal.drafter_nodes), along
                )
            if not proposal.draft:
                estimates.observe_chain(len(proposal.drafter_nodes), along)
            elif proposal.chain and outcome.drafting is not None:
                drafting_ms = _milliseconds(outcome.drafting)
                estimates.observe_in_process(proposal.drafter, len(proposal.drafter_nodes), along, drafting_ms)
        if proposal.lookup is Lookup.HIT:
            estimates.observe_turnaround(outcome.idle_ns / MILLISECOND_NS)
        if request.admit.mode == "auto" and ended.number > 1:  # the first may have waited for a prompt
            self._policy_of(request).observe_round(ended.plan, len(kept), round_ms)

    def _can_judge(self, request: Request) -> bool:
        """Whether it matters which kind its text is of."""
        return request.admit.mode == "auto" and self.estimates.active == 1

    def judge_in_process(self, request: Request, ended: RoundSnapshot, outcome: Outcome) -> None:
        """Leaves a drafter of the target's process that is of no use any more out of the request, and says so."""
        drafter = ended.proposal.drafter
        if not ended.proposal.draft or drafter in request.left_out or request.remaining < ended.plan.depth:
            return
        why = request.drifts.setdefault(drafter, Drift()).observe(ended.proposal.depth, outcome.accepted)
        if why:
            request.left_out.add(drafter)
            request.add_note(f"speculation: {drafter} is not used: {why}")
            self.on_drafter_rejoined(request)

    def _judge_copy(self, request: Request, proposal: Proposal, outcome: Outcome, kept: tuple[int, ...]) -> None:
        """Every round shows what a copy would have been worth in it, whatever was verified."""
        foretold = request.pending_copy
        if foretold is not None and foretold.base_len == outcome.base_len:
            held = self.estimates.observe_copy(foretold.copy, kept)
            if self._can_judge(request):
                self.profiles.observe_copy(request.text, min(len(foretold.copy.chain), len(kept)), held)
            own, copy = proposal.drafter_nodes, foretold.copy
            if own and copy.chain and proposal.chain[own[0]] != copy.chain[0]:
                self.estimates.observe_alternatives(copy, kept)
        if not request.ngrams.is_empty:
            request.pending_copy = PendingCopy(len(request.tokens), longest_copy(request.ngrams, LONGEST_COPY))

    def _observe_forward(self, own: int, outcome: Outcome) -> None:
        """One forward brings an outcome to each that had a part in it, and is counted once."""
        if outcome.work.ended_ns != self._forward_ns:
            self._forward_ns = outcome.work.ended_ns
            self.estimates.observe_verify(max(outcome.rows, own), _milliseconds(outcome.work), own)

    # --- controllers ----------------------------------------------------------------------------------------------

    def _sources_of(self, request: Request) -> DraftSources:
        return self._sources(request.admit, len(request.drafters), request.left_out)

    def _sources(self, admit: Admit, workers: int, left_out: Collection[str] = ()) -> DraftSources:
        """Who may draft for a request; where it names one, only that one."""
        own = tuple(self._own())
        self.estimates.add_drafters(own)
        others = tuple(one.name for one in own if one.name not in left_out)
        others += (NGRAM,) if self._settings.ngrams and (own or admit.drafter == NGRAM) else ()
        if admit.drafter:
            named = admit.drafter.split(JOINT)
            others = tuple(name for name in others if name in named)
            workers = workers if DRAFT_MODEL in named else 0
        return DraftSources(workers, others)

    @property
    def _all_sources(self) -> DraftSources:
        """Those that the cluster begins with."""
        others = tuple(one.name for one in self._own())
        return DraftSources(self._settings.drafters, (*others, NGRAM) if others and self._settings.ngrams else others)

    def _policy_of(self, request: Request) -> Policy:
        return self._policy(request.admit, self._sources_of(request), request.text.kind, request.text.odds)

    def _policy(
        self, admit: Admit, means: DraftSources, kind: str = FREE, odds: TextAcceptance | None = None
    ) -> Policy:
        """One for each set of means and class of temperature: what was learned with others would mislead. So it would
        of other kinds of text; with other requests all follow one plan, whatever they are about."""
        kind = kind if self.estimates.active == 1 else FREE
        key = (means, admit.num_draft_tokens, admit.branches, admit.sampling.temp > 0, kind)
        if key not in self._policies:
            copies = self._settings.ngrams and not means.others
            modes = ("ar", "sd", "ssd") if means.workers else ("ar", "sd") if copies else ("ar",)
            fixed = admit.branches is not None
            branches = self._branches(admit, means.workers)
            policy = Policy(self.estimates, modes, self._depth(admit), branches, fixed, means.others)
            policy.set_load(self.estimates.active, self._reading)
            for known in (self._tunings, self._stored) if means.workers or means.others else ():
                record = nearest(known, admit.sampling.temp)
                if record is not None and (known is self._tunings or record.is_greedy == (admit.sampling.temp == 0)):
                    choices = [choice for choice in record.choices if _may_have(admit, choice)]
                    policy.start_from(_of_kind(choices, kind))
            if kind and (like := self._policies.get((*key[:-1], FREE))) is not None and not policy.has_records:
                policy.start_like(like)
            self._policies[key] = policy
            self._forget_requested()
        self._policies[key].odds = odds or self.profiles.odds(kind, admit.sampling.temp == 0)
        return self._policies[key]

    def _forget_requested(self) -> None:
        """Of those for a K or a B that requests asked for the oldest go: there are as many as anybody thinks of."""
        wished = [key for key in self._policies if key[1:3] != (None, None)]
        for key in wished[:-MOST_WISHED]:
            del self._policies[key]

    def _depth(self, admit: Admit) -> int:
        return admit.num_draft_tokens or self._settings.depth

    def _branches(self, admit: Admit, drafters: int) -> int:
        """Where no number is given, as many for each drafter."""
        each = max(drafters, 1) if self._settings.each else 1
        return admit.branches or self._settings.branches * each


def _of_kind(choices: Sequence[TunedArm], kind: str) -> Sequence[TunedArm]:
    """What is known of this kind of text, or else of texts in general."""
    return [one for one in choices if one.kind == kind] or [one for one in choices if one.kind == FREE]


def _may_have(admit: Admit, choice: TunedArm) -> bool:
    """Whether the request leaves K and B open, or to be what was tuned."""
    fits_depth = admit.num_draft_tokens is None or choice.depth <= admit.num_draft_tokens
    return fits_depth and (admit.branches is None or choice.mode != "ssd" or choice.branches == admit.branches)


def _milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / MILLISECOND_NS
