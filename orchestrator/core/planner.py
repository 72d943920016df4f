"""Feeds the estimates and policies with the results of rounds, and sets each request's plan.

The scheduler reports what was sent and received; the planner sends nothing and records no metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from outrider.orchestrator.core.policy.acceptance import GENERAL_TEXT, TextAcceptance
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecasts
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning, nearest_record
from outrider.orchestrator.core.proposal import CopyRound, Lookup, best_tail, longest_copy
from outrider.orchestrator.core.request import Request, SettledRound
from outrider.orchestrator.events import Admit
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.heads import DRAFT_MODEL, JOINT_SEPARATOR, NGRAM
from outrider.protocol.messages import Abilities
from outrider.protocol.ngrams import MAX_COPY_TOKENS

MAX_REQUESTED_POLICIES = 64  # policies for a requested K or B


@dataclass(frozen=True, slots=True)
class DraftSources:
    """What may draft for a request: this many draft `workers`, and `others`: in-process drafters and n-grams."""

    workers: int
    others: tuple[str, ...] = ()


class Planner:
    """The estimates and policies of all requests: each begins from what earlier ones measured."""

    def __init__(
        self,
        settings: ServeSettings,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
        abilities: Callable[[], Abilities] = Abilities,
    ) -> None:
        """`tunings` are tune's, `memory` what an earlier server `learned`; `abilities` returns the target's."""
        self.estimates = Estimates()
        self._kinds = defaultdict[tuple[str, bool], TextAcceptance](lambda: TextAcceptance(self.estimates))
        self._abilities = abilities
        self._tunings, self._stored = tunings, memory
        for record in (*tunings[:1], *memory[:1]):
            self.estimates.start_from(record)
        self._settings, self._depth, self._breadth = settings, settings.depth, settings.breadth
        self._chooses_branches = settings.branches is None and not settings.full_depth
        self.merges = settings.trees and not settings.full_depth  # chains into trees, where the target can verify them
        self._policies: dict[tuple[DraftSources, int | None, int | None, bool, str], Policy] = {}
        self._forward_ns = 0

    def set_load(self, active: int) -> None:
        """Sets how many requests run."""
        self.estimates.active = max(active, 1)
        for policy in self._policies.values():
            policy.set_load(active)

    def learned(self) -> tuple[Tuning, ...]:
        """Returns the records for the next server: one for each temperature class with measured or stored arms. A
        stored rate is kept until its arm is measured with texts of that kind and as many requests."""
        workers = self._settings.drafters if self._settings.has_draft_worker else 0
        learned, all_sources = [], self._sources("", workers)
        if all_sources == DraftSources(0):
            return ()  # SD is by n-grams here, and by draft workers for a server that they join
        for greedy in (True, False):
            choices = [choice for record in self._stored if record.is_greedy == greedy for choice in record.choices]
            choices += [
                replace(choice, kind=kind)
                for (sources, depth, branches, sampled, kind), policy in self._policies.items()
                if sources == all_sources and depth is None and branches is None and sampled != greedy
                for choice in policy.learned()
            ]
            newest = {replace(choice, tokens_per_second=0.0): choice for choice in choices}
            best_first = sorted(newest.values(), key=lambda choice: -choice.tokens_per_second)
            if best_first:
                learned.append(self.estimates.snapshot(tuple(best_first), 0.0 if greedy else 1.0))
        return tuple(learned)

    # --- plans ----------------------------------------------------------------------------------------------------

    def open_text(self, kind: str, greedy: bool) -> TextAcceptance:
        """Returns the acceptance in a new text of this kind, `greedy` or sampled."""
        return TextAcceptance(self._kinds[kind, greedy], kind)

    def first_plan(self, admit: Admit, drafters: int, text: TextAcceptance) -> tuple[Arm, list[str]]:
        """Returns a request's first plan with this many draft workers, and notes: why speculation is off, if it is."""
        sources = self._sources(admit.drafter, drafters)
        if admit.mode == "auto":
            return self._policy(admit, sources, text).plan(), []
        return self._fixed_plan(admit, sources)

    def _fixed_plan(self, admit: Admit, sources: DraftSources) -> tuple[Arm, list[str]]:
        """Returns the plan in a fixed mode: draft workers come before in-process drafters, and those before n-grams."""
        depth, branches = self._max_depth(admit), self._max_branches(admit, sources.workers)
        if admit.mode == "ar" or sources.workers:
            joint = admit.mode == "ssd" and JOINT_SEPARATOR in admit.drafter and sources.others
            return Arm(admit.mode, depth, branches, sources.others[0] if joint else ""), []
        if sources.others:
            return Arm("sd", depth, branches, sources.others[0]), []
        if self._settings.ngrams:
            return Arm(admit.mode, depth, branches), []
        return Arm("ar", depth, branches), ["speculation is off: there is no drafter"]

    def on_drafters_changed(self, request: Request) -> None:
        """Updates a fixed plan after the set of drafters has changed."""
        if request.admit.mode != "auto":
            request.planning.plan, _ = self._fixed_plan(request.admit, self._sources_of(request))

    def replan(self, request: Request) -> None:
        """Sets the plan of the next round: the policy's in `auto`; in SSD, an open B to the best one by the
        forecast for this K, which the drafter can finish."""
        is_open = request.admit.branches is None and self._chooses_branches
        if request.admit.mode == "auto":
            request.planning.plan = self._policy_of(request).plan()
        elif request.plan.mode == "ssd" and request.round.number % POLICY.breadth_interval_rounds == 0 and is_open:
            most = self._max_branches(request.admit, self._sources_of(request).workers)
            text, depth = request.planning.text, request.plan.depth
            formula = Forecasts(self.estimates, text, self.estimates.active, depth, most, fixed=False)
            request.planning.plan = replace(request.plan, branches=formula.forecast(Arm("ssd", depth))[0].branches)

    def wants_other_plan(self, request: Request) -> bool:
        """Whether a target that continues by itself is to stop, because the policy has another plan."""
        return request.admit.mode == "auto" and self._policy_of(request).plan() != request.plan

    def may_replan(self, request: Request) -> bool:
        """Whether the policy may have another plan after the round under way."""
        if request.admit.mode != "auto":
            return False
        policy = self._policy_of(request)
        return policy.is_due or policy.plan() != request.plan

    def drafters_are_idle(self, request: Request) -> bool:
        """Whether the target may use all cores for this request's verifies (`Arm.leaves_drafters_idle`)."""
        return request.admit.mode == "auto" and request.plan.leaves_drafters_idle(self.estimates.active)

    def reason(self, request: Request) -> str | None:
        """Returns the reason for the plan of a request in `auto`; None in other modes."""
        return f"auto: {self._policy_of(request).why}" if request.admit.mode == "auto" else None

    # --- observations ---------------------------------------------------------------------------------------------

    def on_outcome(self, ended: SettledRound) -> None:
        """Records the costs and the acceptance of a round; no costs if it read the whole text."""
        request, outcome, kept = ended.request, ended.outcome, ended.kept
        self._observe_copy(ended)
        if ended.read:
            return
        proposal, estimates, round_ms = ended.proposal, self.estimates, ended.took_ns / MILLISECOND_NS
        estimates.observe_round(len(kept), round_ms)
        if proposal.lookup is not Lookup.NONE:
            # A late branch counts too: the proposer decides whether it is worth a wait.
            estimates.observe_lookup(proposal.lookup.found, ended.covered)
        if proposal.autonomous and not proposal.draft:
            # Mode `ar` leaves the drafters their core.
            if round_ms > 0 and (request.admit.mode == "auto" or not estimates.may_use_all_cores):
                estimates.pipelined_ms.add(max(outcome.rows, 1), round_ms)
        elif ended.plan.mode != "ar":
            if outcome.work.ended_ns != self._forward_ns:  # several requests report the same forward
                self._forward_ns, rows = outcome.work.ended_ns, len(proposal.chain) + 1
                all_cores = request.admit.mode == "auto" and ended.plan.leaves_drafters_idle(estimates.active)
                estimates.observe_verify(max(outcome.rows, rows), outcome.work.milliseconds, rows, all_cores)
            accepted, drafted = proposal.count_on_chain(ended.nodes), len(proposal.offered or proposal.drafter_nodes)
            if self._observes_texts(request) and proposal.drafter != NGRAM:
                request.planning.text.observe(proposal.drafter if proposal.draft else "", drafted, accepted)
            if not proposal.draft:
                estimates.observe_chain(drafted, accepted, min(len(proposal.chain), drafted))
            elif proposal.drafter != NGRAM and proposal.chain and outcome.drafted is not None:
                drafting_ms = outcome.drafted.span.milliseconds
                estimates.in_process[proposal.drafter].observe(len(proposal.drafter_nodes), accepted, drafting_ms)
        if proposal.lookup is Lookup.HIT:
            estimates.observe_turnaround(outcome.idle_ns / MILLISECOND_NS)
        if request.admit.mode == "auto" and ended.number > 1:  # the first may have waited for a prompt
            self._policy_of(request).observe_round(ended.plan, len(kept), round_ms, proposal.lookup.found)

    def _observes_texts(self, request: Request) -> bool:
        """Whether the acceptance in its text is recorded: in `auto`, while it runs alone."""
        return request.admit.mode == "auto" and self.estimates.active == 1

    def check_in_process_drafter(self, ended: SettledRound) -> str:
        """Leaves out an in-process drafter that proposes nothing more to the request; returns a note if it does."""
        request, drafter, planning = ended.request, ended.proposal.drafter, ended.request.planning
        is_judged = ended.proposal.draft and drafter != NGRAM and drafter not in planning.left_out
        if not is_judged or request.remaining < ended.plan.depth:
            return ""
        rounds = planning.silent_rounds[drafter] = 0 if ended.proposal.depth else planning.silent_rounds[drafter] + 1
        if rounds < POLICY.max_silent_rounds:
            return ""
        planning.left_out.add(drafter)
        self.on_drafters_changed(request)
        return f"speculation: {drafter} is not used: it proposed nothing in {rounds} rounds"

    def _observe_copy(self, ended: SettledRound) -> None:
        """Records how a copy would have done in this round, whatever was verified; then finds the next round's copy."""
        request, proposal, kept = ended.request, ended.proposal, ended.kept
        planning, sequence, pending = request.planning, request.sequence, request.planning.pending_copy
        if pending is not None and pending.base_len == ended.outcome.base_len:
            copy, nodes = pending.copy, proposal.drafter_nodes
            self.estimates.copied.add(copy, kept)
            if nodes and copy.chain and proposal.chain[nodes[0]] != copy.chain[0]:
                self.estimates.alternatives.add(copy, kept)
        if not sequence.ngrams.is_empty:
            copy = longest_copy(sequence.ngrams, MAX_COPY_TOKENS)
            rows = len(best_tail(self.estimates, copy).tokens)
            planning.pending_copy = CopyRound(len(sequence.tokens), copy, rows)
            self._observe_copy_round(request)

    def _observe_copy_round(self, request: Request) -> None:
        """Records the rounds that n-grams alone would make; one with a long copy lasts several plain rounds."""
        planning, tokens, round_ = request.planning, request.sequence.tokens, request.planning.copy_round
        if round_ is not None:
            right = round_.right(tokens[round_.base_len :])
            if right is None:
                return
            self.estimates.copies.add(round_.rows, right)
            if self._observes_texts(request):
                planning.text.observe_copies(round_.rows, right)
        planning.copy_round = planning.pending_copy

    # --- policies -------------------------------------------------------------------------------------------------

    def _sources_of(self, request: Request) -> DraftSources:
        return self._sources(request.admit.drafter, len(request.draft.drafters), request.planning.left_out)

    def _sources(self, named: str, workers: int, left_out: Collection[str] = ()) -> DraftSources:
        """Returns what may draft for a request: only the drafters that it has `named`, if any."""
        abilities = self._abilities()
        in_process, self.estimates.may_use_all_cores = abilities.drafters, abilities.all_cores
        self.estimates.add_drafters(in_process)
        others = tuple(drafter.name for drafter in in_process if drafter.name not in left_out)
        others += (NGRAM,) if self._settings.ngrams and (in_process or workers or named == NGRAM) else ()
        if named:
            names = named.split(JOINT_SEPARATOR)
            others, workers = tuple(name for name in others if name in names), workers if DRAFT_MODEL in names else 0
        return DraftSources(workers, others)

    def _policy_of(self, request: Request) -> Policy:
        return self._policy(request.admit, self._sources_of(request), request.planning.text)

    def _policy(self, admit: Admit, sources: DraftSources, text: TextAcceptance) -> Policy:
        """Returns the policy for these sources, requested K and B, temperature class and, for a request alone, kind of
        text: measurements under others would mislead. With several requests all follow one plan, whatever their kind.
        """
        kind = text.kind if self.estimates.active == 1 else GENERAL_TEXT
        key = (sources, admit.num_draft_tokens, admit.branches, admit.sampling.temp > 0, kind)
        if key not in self._policies:
            copies = self._settings.ngrams and not sources.others
            modes = ("ar", "sd", "ssd") if sources.workers else ("ar", "sd") if copies else ("ar",)
            fixed = admit.branches is not None
            branches = self._max_branches(admit, sources.workers)
            policy = Policy(self.estimates, modes, self._max_depth(admit), branches, fixed, sources.others)
            policy.set_load(self.estimates.active)
            for records in (self._tunings, self._stored) if sources.workers or sources.others else ():
                record = nearest_record(records, admit.sampling.temp)
                if record is not None and (records is self._tunings or record.is_greedy == (admit.sampling.temp == 0)):
                    choices = [choice for choice in record.choices if _is_allowed(admit, choice)]
                    of_kind = [choice for choice in choices if choice.kind == kind]  # else texts in general
                    policy.start_from(of_kind or [choice for choice in choices if choice.kind == GENERAL_TEXT])
            self._policies[key] = policy
            # Clients may request any number of K and B: the oldest of those policies are dropped.
            for old in [other for other in self._policies if other[1:3] != (None, None)][:-MAX_REQUESTED_POLICIES]:
                del self._policies[old]
        self._policies[key].acceptance = text
        return self._policies[key]

    def _max_depth(self, admit: Admit) -> int:
        return admit.num_draft_tokens or self._depth

    def _max_branches(self, admit: Admit, drafters: int) -> int:
        """Returns the requested B, or the default: the setting, with `each` for every drafter."""
        each = max(drafters, 1) if self._settings.branches is None else 1
        return admit.branches or self._breadth * each


def _is_allowed(admit: Admit, choice: TunedArm) -> bool:
    """Whether the request's K and B, if given, allow the choice."""
    fits_depth = admit.num_draft_tokens is None or choice.depth <= admit.num_draft_tokens
    return fits_depth and (admit.branches is None or choice.mode != "ssd" or choice.branches == admit.branches)
