"""What the rounds learn from, and what follows: the live estimates, the controllers, each request's plan.

The rounds tell it what was sent and what came; it writes nothing down and never sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.orchestrator.core.controller import Controller
from outrider.orchestrator.core.copies import LONGEST_COPY, longest_copy
from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.forecasts import Plan
from outrider.orchestrator.core.proposal import Lookup
from outrider.orchestrator.core.request import Foretold, Request, Round, RoundSettings, Waiting
from outrider.orchestrator.core.tuning import Choice, Tuning, nearest
from outrider.orchestrator.events import Admit
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Branches, Drafted, Outcome, Span


class Planner:
    """One for all requests, so that what one taught serves the next."""

    def __init__(self, settings: RoundSettings, tunings: Sequence[Tuning] = (), memory: Sequence[Tuning] = ()) -> None:
        """`tunings` are tune's, `memory` what an earlier server's planner `learned`."""
        self.estimates = Estimates()
        self._tunings, self._memory = tunings, memory
        for known in (*tunings[:1], *memory[:1]):
            self.estimates.start_from(known)
        self._settings = settings
        self._controllers: dict[tuple[int, int | None, int | None, bool], Controller] = {}
        self._forward_ns = 0

    def turn_to(self, active: int) -> None:
        """So many requests run at once now."""
        self.estimates.active = max(active, 1)
        for controller in self._controllers.values():
            controller.turn_to(active)

    def learned(self) -> tuple[Tuning, ...]:
        """What the next server may start from: costs and odds, and by class of temperature what was measured."""
        found = []
        for greedy in (True, False):
            choices = [
                choice
                for (drafters, depth, branches, warm), controller in self._controllers.items()
                if drafters == self._settings.drafters and depth is None and branches is None and warm != greedy
                for choice in controller.learned()
            ]
            known = next((record for record in self._memory if record.is_greedy == greedy), None)
            choices = choices or list(known.choices if known is not None else ())
            if choices:
                best_first = sorted(choices, key=lambda choice: -choice.tokens_per_second)
                found.append(self.estimates.told(tuple(best_first), 0.0 if greedy else 1.0))
        return tuple(found)

    # --- plans ----------------------------------------------------------------------------------------------------

    def first_plan(self, admit: Admit, drafters: int) -> tuple[Plan, list[str]]:
        """How a request's rounds are made with so many drafters, and the reason when speculation is off."""
        depth, branches = self._depth(admit), self._branches(admit, drafters)
        if admit.mode == "auto":
            return self._controller(admit, drafters).plan(), []
        if admit.mode == "ar" or drafters or self._settings.ngrams or self._settings.colocated:
            return Plan(admit.mode, depth, branches), []
        return Plan("ar", depth, branches), ["speculation is off: there is no drafter"]

    def regain(self, request: Request) -> None:
        """There is a drafter for a request that may have begun without one."""
        if request.admit.mode != "auto":
            request.plan, _ = self.first_plan(request.admit, len(request.drafters))

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
            # Late or not: `fallback` says whether that is worth a wait.
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
        self._judge_copy(request, outcome, kept)
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
            estimates.saw_chain(proposal.drafted, proposal.along(proposal.nodes(outcome) or ()))
        if proposal.chain and outcome.drafting is not None:
            estimates.saw_draft(len(proposal.line), _milliseconds(outcome.drafting))
            estimates.saw_link(0.0)
        if proposal.lookup is Lookup.HIT:
            estimates.saw_turnaround(outcome.idle_ns / MILLISECOND_NS)
        if request.admit.mode == "auto" and ended.number > 1:  # the first may have waited for a prompt
            self._controller_of(request).saw_round(ended.plan, len(kept), round_ms)

    def _judge_copy(self, request: Request, outcome: Outcome, kept: tuple[int, ...]) -> None:
        """Every round shows what a copy would have been worth in it, whatever was verified."""
        foretold = request.foretold
        if foretold is not None and foretold.base_len == outcome.base_len:
            self.estimates.saw_copy(foretold.copy, kept)
        if not request.ngrams.is_empty:
            request.foretold = Foretold(len(request.tokens), longest_copy(request.ngrams, LONGEST_COPY))

    def _saw_forward(self, own: int, outcome: Outcome) -> None:
        """One forward brings an outcome to each that had a part in it, and is counted once."""
        if outcome.work.ended_ns != self._forward_ns:
            self._forward_ns = outcome.work.ended_ns
            self.estimates.saw_verify(max(outcome.rows, own), _milliseconds(outcome.work), own)

    # --- controllers ----------------------------------------------------------------------------------------------

    def _controller_of(self, request: Request) -> Controller:
        return self._controller(request.admit, len(request.drafters))

    def _controller(self, admit: Admit, drafters: int) -> Controller:
        """One for each set of means and class of temperature: what was learned with others would mislead."""
        means = (drafters, admit.num_draft_tokens, admit.branches, admit.sampling.temp > 0)
        if means not in self._controllers:
            drafts = self._settings.ngrams or self._settings.colocated
            modes = ("ar", "sd", "ssd") if drafters else ("ar", "sd") if drafts else ("ar",)
            fixed = admit.branches is not None
            branches = self._branches(admit, drafters)
            controller = Controller(self.estimates, modes, self._depth(admit), branches, fixed)
            controller.turn_to(self.estimates.active)
            for known in (self._tunings, self._memory) if drafters else ():
                record = nearest(known, admit.sampling.temp)
                if record is not None and (known is self._tunings or record.is_greedy == (admit.sampling.temp == 0)):
                    controller.start_from(choice for choice in record.choices if _may_have(admit, choice))
            self._controllers[means] = controller
        return self._controllers[means]

    def _depth(self, admit: Admit) -> int:
        return admit.num_draft_tokens or self._settings.depth

    def _branches(self, admit: Admit, drafters: int) -> int:
        """Where nobody says how many, as many for each drafter."""
        each = max(drafters, 1) if self._settings.each else 1
        return admit.branches or self._settings.branches * each


def _may_have(admit: Admit, choice: Choice) -> bool:
    """Whether the request leaves K and B open, or to be what was tuned."""
    fits_depth = admit.num_draft_tokens is None or choice.depth <= admit.num_draft_tokens
    return fits_depth and (admit.branches is None or choice.mode != "ssd" or choice.branches == admit.branches)


def _milliseconds(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / MILLISECOND_NS
