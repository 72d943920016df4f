"""What the rounds learn from, and what follows: the live estimates, the controllers, each request's plan.

The rounds tell it what was sent and what came; it writes nothing down and never sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.orchestrator.core.controller import Controller, Plan
from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.proposal import Lookup, Proposal
from outrider.orchestrator.core.request import Request, Round, RoundSettings, Waiting
from outrider.orchestrator.core.tuning import Choice, Tuning, nearest
from outrider.orchestrator.events import Admit
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Branches, Drafted, Outcome, Span


class Planner:
    """One for all requests, so that what one taught serves the next."""

    def __init__(self, settings: RoundSettings, tunings: Sequence[Tuning] = ()) -> None:
        self.estimates = Estimates()
        self._by_load = {0: self.estimates}
        self._load = 0
        self._tunings = tunings
        if tunings:
            self.estimates.start_from(tunings[0])
        self._settings = settings
        self._controllers: dict[tuple[bool, int | None, int | None, bool, int], Controller] = {}

    def turn_to(self, active: int) -> Estimates:
        """So many requests run at once now: what holds at about this load. Costs and rates are each load's own."""
        self._load = max(active - 1, 0).bit_length()
        if self._load not in self._by_load:
            self._by_load[self._load] = Estimates(self._by_load[0])
        self.estimates = self._by_load[self._load]
        return self.estimates

    # --- plans ----------------------------------------------------------------------------------------------------

    def first_plan(self, admit: Admit, has_drafter: bool) -> tuple[Plan, list[str]]:
        """How a request's rounds are made, and the reason when speculation is off."""
        depth, branches = self._depth(admit), self._branches(admit)
        if admit.mode == "auto":
            return self._controller(admit, has_drafter).plan(), []
        if admit.mode == "ar" or has_drafter or self._settings.ngrams or self._settings.colocated:
            return Plan(admit.mode, depth, branches), []
        return Plan("ar", depth, branches), ["speculation is off: there is no drafter"]

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

    def missed(self) -> None:
        """A lookup found nothing, and a drafter was asked."""
        self.estimates.saw_lookup(False)

    def proposed(self, proposal: Proposal) -> None:
        if proposal.lookup is not Lookup.NONE:
            # Late or not: `fallback` says whether that is worth a wait.
            self.estimates.saw_lookup(proposal.lookup.found)

    def branches(self, message: Branches) -> None:
        if message.entries:
            self.estimates.saw_depth(_milliseconds(message.work))

    def drafted(self, message: Drafted, waiting: Waiting, now_ns: int) -> None:
        work_ms = _milliseconds(message.work)
        self.estimates.saw_draft(len(message.chain), work_ms)
        self.estimates.saw_link((now_ns - waiting.asked_ns) / MILLISECOND_NS - work_ms)

    def outcome(self, request: Request, ended: Round, outcome: Outcome, kept: int, now_ns: int) -> None:
        """What a round says about costs and odds; the first is the prompt's."""
        round_ms, request.handled_ns = (now_ns - request.handled_ns) / MILLISECOND_NS, now_ns
        if ended.number == 0:
            return
        proposal, estimates = ended.proposal, self.estimates
        estimates.saw_round(kept, round_ms)
        if proposal.going_on and not proposal.draft:
            estimates.saw_ar(round_ms)
        elif ended.plan.mode != "ar":
            estimates.saw_verify(len(proposal.chain) + 1, _milliseconds(outcome.work))
            drafted = len(proposal.chain) - proposal.copied
            estimates.saw_chain(drafted, outcome.accepted, proposal.copied, proposal.matched)
        if proposal.chain and outcome.drafting is not None:
            estimates.saw_draft(len(proposal.chain), _milliseconds(outcome.drafting))
            estimates.saw_link(0.0)
        if proposal.lookup is Lookup.HIT:
            estimates.saw_turnaround(outcome.idle_ns / MILLISECOND_NS)
        if request.admit.mode == "auto" and ended.number > 1:  # the first may have waited for a prompt
            self._controller_of(request).saw_round(ended.plan, kept, round_ms)

    # --- controllers ----------------------------------------------------------------------------------------------

    def _controller_of(self, request: Request) -> Controller:
        return self._controller(request.admit, bool(request.drafters))

    def _controller(self, admit: Admit, has_drafter: bool) -> Controller:
        """One for each set of means, class of temperature and load: what was learned with others would mislead."""
        means = (has_drafter, admit.num_draft_tokens, admit.branches, admit.sampling.temp > 0, self._load)
        if means not in self._controllers:
            drafts = self._settings.ngrams or self._settings.colocated
            modes = ("ar", "sd", "ssd") if has_drafter else ("ar", "sd") if drafts else ("ar",)
            width = 2**self._load
            controller = Controller(self.estimates, modes, self._depth(admit), self._branches(admit), width)
            tuning = nearest(self._tunings, admit.sampling.temp)
            if tuning is not None and has_drafter and not self._load:  # a tuning is of one request at a time
                controller.start_from(choice for choice in tuning.choices if _may_have(admit, choice))
            self._controllers[means] = controller
        return self._controllers[means]

    def _depth(self, admit: Admit) -> int:
        return admit.num_draft_tokens or self._settings.depth

    def _branches(self, admit: Admit) -> int:
        return admit.branches or self._settings.branches


def _may_have(admit: Admit, choice: Choice) -> bool:
    """Whether the request leaves K and B open, or to be what was tuned."""
    fits_depth = admit.num_draft_tokens is None or choice.depth <= admit.num_draft_tokens
    return fits_depth and (admit.branches is None or choice.mode != "ssd" or choice.branches == admit.branches)


def _milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / MILLISECOND_NS
