"""The rounds of speculative speculative decoding (paper algorithm 1, the verifier's side).

AR, SD and SSD are this one loop with different proposals. An outcome is handled in this order: integer checks, the
lookup, the next VERIFY, COMMIT, and only then the event for the front, which makes the text. Owns the running
requests; knows tokens and integers only. Time is passed in.

`set_up_request`: how a new request's rounds are made, who drafts for it, and the notes about that.

`TargetRecovery`: the time without a target: which requests wait for its replacement, and in what order they continue.
All that were under way continue together. Where the target dies again before one of them has got a token, that request
is a suspect; on the next replacement suspects run one at a time, with no other request, until their first token. A
request that kills the target alone fails, and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from outrider.orchestrator.core.draft_pool import DraftPool, Workers
from outrider.orchestrator.core.message_validator import LATE, MessageValidator
from outrider.orchestrator.core.metrics import RequestMetrics, RoundMetrics, RoundRecords, Trace
from outrider.orchestrator.core.next_round import Alternation, Dispatch, NextRound, RemotePrefills, wait_for_others
from outrider.orchestrator.core.ngram import PIECE, NgramIndex
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.text_profiles import kind_of
from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.core.proposer import Proposer
from outrider.orchestrator.core.request import (
    DrafterState,
    Request,
    RoundSettings,
    SettledRound,
    remaining_tokens,
    up_to_end,
)
from outrider.orchestrator.core.speculation_cache import CacheBudget, SpeculationCache
from outrider.orchestrator.events import (
    Admit,
    Committed,
    PrefillProgress,
    RequestBegan,
    RequestEnded,
    RequestFailed,
    ToFront,
)
from outrider.protocol.clock import ASK_AGAIN_NS
from outrider.protocol.messages import (
    Branches,
    Drafted,
    Fault,
    Features,
    Message,
    Outcome,
    Prefilled,
    Resync,
    WorkerNote,
)

# Deaths of the target in a row while a request was under way and got no token: it is tried alone, it is given up.
SUSPECT, GUILTY = 2, 3


class TargetRecovery:
    """From the target's death until every request is on its replacement; in between there is none.

    `open_` begins a request on the target and its drafters, from its committed tokens.
    """

    def __init__(self, open_: Callable[[Request], None]) -> None:
        self._open = open_
        self._away = False
        self._trial: Request | None = None
        self._waiting: dict[str, Request] = {}

    def on_target_lost(self, requests: Sequence[Request], why: str) -> list[tuple[Request, str]]:
        """The target has died; `requests` wait from now on. Returns those that fail, with the reason."""
        under_way = [request for request in requests if not self.is_waiting(request)]
        self._away, self._trial = True, None
        for request in under_way:
            request.suspend()
            request.add_note(f"the text continued after a pause: {why}")
            request.deaths += 1
            request.metrics.resumed += 1
            self._waiting[request.id] = request
        words = f"{why}, for the third time in a row with this request, the last time with this request alone"
        return [(request, words) for request in under_way if request.deaths >= GUILTY]

    def on_target_found(self) -> None:
        """There is a target again."""
        self._away = False
        self._open_next()

    def admit(self, request: Request) -> None:
        """Opens a new request as soon as it may be on the target."""
        self._waiting[request.id] = request
        self._open_next()

    def is_waiting(self, request: Request) -> bool:
        """Whether it waits."""
        return request.id in self._waiting

    def is_on_trial(self, request: Request) -> bool:
        """Whether this one is tried alone."""
        return request is self._trial

    def clear_suspect(self, request: Request) -> None:
        """It was tried and got its first token; it goes on once all suspects were tried."""
        request.suspend()
        self._trial = None
        self.admit(request)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._waiting.pop(request.id, None)
        if self.is_on_trial(request):
            self._trial = None
        self._open_next()

    def _open_next(self) -> None:
        """Opens the requests that may be on the target now: a suspect by itself, or all."""
        if self._away or self._trial is not None or not self._waiting:
            return
        self._trial = next((request for request in self._waiting.values() if request.deaths >= SUSPECT), None)
        for request in [self._trial] if self._trial is not None else list(self._waiting.values()):
            del self._waiting[request.id]
            self._open(request)


def set_up_request(admit: Admit, workers: Workers, planner: Planner, budget: CacheBudget, now_ns: int) -> Request:
    """The request before anything was sent about it; its n-grams are still to be read."""
    less = workers.notes() if admit.mode != "ar" else []
    if not workers.target_abilities.chains:
        admit = replace(admit, mode="ar")
    drafters = workers.drafters() if admit.takes_workers else set()
    tokens = [*admit.tokens, *admit.resume_tokens]
    looks = kind_of(tokens, admit.sampling.grammar is not None, admit.code)
    text = planner.profiles.open(looks, admit.sampling.temp == 0)
    plan, notes = planner.first_plan(admit, len(drafters), text.kind)
    return Request(
        admit,
        plan,
        tokens=tokens,
        ngrams=NgramIndex(),
        text=text,
        drafters={name: DrafterState() for name in sorted(drafters)},
        cache=SpeculationCache(budget),
        heard_ns=now_ns,
        metrics=RequestMetrics(admitted_ns=now_ns),
        records=RoundRecords(now_ns) if admit.rounds else None,
        takes_trees=planner.trees and workers.target_abilities.trees and not admit.sampling.is_residual,
        notes=[*less, *notes],
    )


class Scheduler:
    """All requests in flight, and what comes next for each."""

    def __init__(
        self,
        workers: Workers,
        settings: RoundSettings,
        tell: Callable[[ToFront], None],
        trace: Trace,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
    ) -> None:
        """`tunings` are tune's for this pair, `memory` what rounds before these `learned`."""
        self.stale = 0
        self._workers = workers
        self._validator = MessageValidator()
        self._dispatch = Dispatch(workers)
        self._remote_prefills = RemotePrefills(workers, self._dispatch, settings.prefill_from)
        self._cache_budget = CacheBudget()
        self._settings = settings
        self._emit = tell
        self._metrics = RoundMetrics(trace)
        self._planner = Planner(settings, tunings, memory, lambda: workers.target_abilities.drafters)
        self._draft_pool = DraftPool(workers, self._validator.sent, self._planner.estimates, settings.full_depth)
        self._requests: dict[str, Request] = {}
        self._proposer = Proposer(self._planner.estimates, settings.full_depth)
        self._next = NextRound(
            workers, self._dispatch, self._draft_pool, self._planner, self._proposer, self._metrics, settings.full_depth
        )
        self._recovery = TargetRecovery(self._open)
        self._alternation = Alternation(self._planner.estimates)

    @property
    def active(self) -> int:
        return len(self._requests)

    @property
    def dropped_branches(self) -> int:
        """How many messages with branches found no room."""
        return self._cache_budget.dropped

    @property
    def metrics(self) -> RoundMetrics:
        return self._metrics

    def learned(self) -> tuple[Tuning, ...]:
        """What later rounds of this pair on this machine may start from."""
        return self._planner.learned()

    # --- what the front says --------------------------------------------------------------------------------------

    def begin(self, admit: Admit, now_ns: int) -> None:
        """OPEN to the target and to the drafters: all read the prompt at once."""
        self._planner.set_load(len(self._requests) + 1, reading=True)
        request = set_up_request(admit, self._workers, self._planner, self._cache_budget, now_ns)
        admit = request.admit
        request.side = self._alternation.side(self._requests.values())
        self._requests[request.id] = request
        self._recovery.admit(request)
        self._workers.flush_and_yield()
        if self._settings.ngrams and admit.mode != "ar":
            request.ngrams.extend(request.tokens)
        self._emit(RequestBegan(request.id, admit.mode, tuple(request.notes)))

    def stop(self, request_id: str, reason: str) -> None:
        """Ends a request whose text is complete or unwanted; the round in flight is cancelled."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def close(self) -> None:
        for request in list(self._requests.values()):
            self._finish(request, "cancelled")

    # --- what happens to workers ----------------------------------------------------------------------------------

    def on_drafter_lost(self, name: str, why: str, now_ns: int) -> None:
        """Requests go on with what drafters are left, or without."""
        for request in list(self._requests.values()):
            if name in request.drafters:
                request.losses[name] += 1
                self._remove_drafter(request, name, why, now_ns)

    def on_drafter_found(self, name: str) -> None:
        """Takes it into all requests that it may draft for, in the middle of their texts."""
        for request in self._requests.values():
            if request.can_join(name) and not self._settings.simulated:
                request.add_rejoined(name)
                self._planner.on_drafter_rejoined(request)
                if not self._recovery.is_waiting(request):
                    self._draft_pool.join(request, name)

    def on_prefill_worker_lost(self, name: str) -> None:
        """The target reads on by itself what that one was reading."""
        self._remote_prefills.on_worker_lost(name, self._requests)

    def on_target_lost(self, why: str, for_good: bool) -> None:
        """Requests wait for its replacement, except suspects that have killed it again, and where none will come."""
        requests = list(self._requests.values())
        over = for_good or self._settings.simulated
        for request, words in [(r, why) for r in requests] if over else self._recovery.on_target_lost(requests, why):
            self._fail(request, words)

    def on_target_found(self) -> None:
        """Requests go on where they were, from their committed tokens."""
        for request in self._requests.values():
            self._planner.on_drafter_rejoined(
                request
            )  # another process may lack a drafter of its own, or have one more
        self._recovery.on_target_found()

    # --- what workers say -----------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message, now_ns: int) -> None:
        """A worker's message about a request. What is stale, or not the sender's to say, is dropped and counted."""
        self.handle_all([(sender, message)], now_ns)

    def handle_all(self, arrived: Iterable[tuple[str, Message]], now_ns: int) -> None:
        """What came together: all messages to workers leave before metrics are written and the front is told."""
        settled: list[SettledRound] = []
        for sender, message in arrived:
            self._handle_one(sender, message, now_ns, settled)
        self._release_side({one.request.side for one in settled}, now_ns)
        if settled:
            self._workers.flush_and_yield()
        for one in settled:
            self._record(one, now_ns)
        if any(one.ended.read for one in settled):
            self._update_planner()

    def _handle_one(self, sender: str, message: Message, now_ns: int, settled: list[SettledRound]) -> None:
        if isinstance(message, WorkerNote):
            self._on_worker_note(sender, message)
            return
        request = self._requests.get(getattr(message, "request", None) or "")
        if self._remote_prefills.has_asked(sender):
            self.stale += not self._remote_prefills.on_message(request, sender, message)
            return
        why_not = self._refusal(request, sender, message)
        if why_not or request is None:
            self.stale += 1
            if why_not != LATE:
                self._workers.record_invalid(sender, why_not)
            return
        if isinstance(message, Outcome | Branches | Drafted):
            request.metrics.held(sender, message.peak_bytes)
        match message:
            case Outcome():
                settled += self._on_outcome(request, message, now_ns)
            case Features():
                self._draft_pool.forward_features(request, message)
            case Branches():
                self._on_branches(request, sender, message, now_ns)
            case Drafted():
                self._on_drafted(request, sender, message, now_ns)
            case Prefilled():
                self._on_prefilled(request, message, sender in request.drafters, now_ns)
            case Resync():
                self._on_resync(request, sender, now_ns)
            case Fault():
                self._on_fault(request, sender, message, now_ns)

    def _refusal(self, request: Request | None, sender: str, message: Message) -> str:
        workers = self._workers
        return self._validator.refusal(request, workers.is_target(sender), sender, message, workers.vocabulary(sender))

    def _on_prefilled(self, request: Request, message: Prefilled, of_drafter: bool, now_ns: int) -> None:
        if message.cached and not request.epoch:
            request.metrics.on_branch_found(message.cached, of_drafter)
        if of_drafter:
            return
        request.heard_ns = now_ns
        self._remote_prefills.on_progress(request, message)
        if not request.generated:
            self._emit(PrefillProgress(request.id, message.done, message.total))

    def next_deadline_ns(self) -> int | None:
        """When `on_time` is to be called at the latest; 0: at once, for a prompt is still to be looked through."""
        if any(request.ngrams.is_behind for request in self._requests.values()):
            return 0
        return min((r.wait.deadline_ns for r in self._requests.values() if r.wait), default=None)

    def on_time(self, now_ns: int) -> None:
        """Ends waits that took too long: with the branch as deep as it is, or the target goes on alone; asks the target
        again where its word may be lost. Looks through a piece of a long prompt."""
        behind = next((request for request in self._requests.values() if request.ngrams.is_behind), None)
        if behind is not None:
            behind.ngrams.read_on(PIECE)
        for request in list(self._requests.values()):
            if request.wait and now_ns >= request.wait.deadline_ns:
                self._draft_pool.on_overdue(request, now_ns)
                self._next.end_wait(request, now_ns)
            elif self._is_silent(request, now_ns):
                request.heard_ns = now_ns
                self._remote_prefills.forget(request)
                self._dispatch.again(request)

    def _is_silent(self, request: Request, now_ns: int) -> bool:
        """Whether the target was not heard to get on with it for so long that a word may be lost."""
        is_under_way = not (request.wait or self._recovery.is_waiting(request))
        return is_under_way and now_ns - request.heard_ns >= ASK_AGAIN_NS

    def _on_outcome(self, request: Request, outcome: Outcome, now_ns: int) -> list[SettledRound]:
        proposal = request.proposal.settled(outcome)
        nodes = proposal.nodes(outcome)
        of_now = outcome.round == request.round and outcome.base_len == request.base_len
        if not of_now or request.wait or nodes is None:
            self.stale += 1
            return []
        request.proposal, request.heard_ns, request.deaths = proposal, now_ns, 0
        if request.reads:
            self._remote_prefills.forget(request)
        said = [*(proposal.chain[node] for node in nodes), outcome.bonus]
        kept, reason = up_to_end(request, self._workers.target_context, said)
        ended, request.reads = request.this_round(), False
        request.tokens += kept
        request.accepted = outcome.accepted
        request.covered = request.cache.covered
        if reason is None:
            request.ngrams.extend(kept if self._settings.ngrams and request.admit.mode != "ar" else ())
            if self._recovery.is_on_trial(request):
                self._recovery.clear_suspect(request)
            elif outcome.next_proposal is not None:
                self._next.on_autonomous_round(request, request.advance(outcome, tuple(kept)), now_ns)
            else:
                request.halted = False
                self._planner.replan(request)
                step = self._proposer.after(request, tuple(kept), self._remaining_tokens(request), now_ns)
                self._next.take(request, step, now_ns)
        request.over = reason is not None
        return [SettledRound(request, ended, outcome, nodes, tuple(kept), reason)]

    def _record(self, settled: SettledRound, now_ns: int) -> None:
        """Records what a round brought, feeds the planner, and tells the front."""
        request, ended, outcome, kept = settled.request, settled.ended, settled.outcome, settled.kept
        self._metrics.on_outcome(request, ended, outcome, len(kept), now_ns)
        self._planner.on_outcome(request, ended, outcome, kept, now_ns)
        self._planner.judge_in_process(request, ended, outcome)
        logprobs = outcome.logprobs.part(0, len(kept)) if outcome.logprobs is not None else None
        origins = ended.proposal.origins(settled.nodes)[: len(kept)] if request.admit.origins else None
        record = self._metrics.record(request, ended, outcome, len(kept))
        self._emit(Committed(request.id, kept, logprobs, origins, (record,) if record is not None else None))
        if settled.reason is not None:
            self._finish(request, settled.reason)

    def _on_branches(self, request: Request, sender: str, message: Branches, now_ns: int) -> None:
        request.losses.pop(sender, None)
        self._metrics.on_branches(request, sender, message, now_ns)
        of_now = message.round == request.round and request.drafters[sender].is_awaited(message)
        if not of_now:
            self._draft_pool.on_late_branches(request, sender, message, now_ns)
            self.stale += 1
            return
        self._draft_pool.on_branches(request, sender, message, now_ns)
        request.cache.add(message, sender)
        if sender == request.cache.lead:
            self._planner.on_branches(request, message, now_ns)
            request.branches_at_ns = now_ns
        if message.final:
            self._next.prepare(request)
        if request.wait and request.wait.outcome:
            step = self._proposer.serve(request, request.wait.outcome, self._remaining_tokens(request), now_ns)
            self._next.take(request, step, now_ns)

    def _on_drafted(self, request: Request, sender: str, message: Drafted, now_ns: int) -> None:
        waiting, of_next = request.wait, request.drafters[sender].is_awaited(message)
        if of_next:
            self._draft_pool.on_drafted(request, sender, message, now_ns)
        if waiting is None or waiting.outcome or not of_next:
            self.stale += 1
            return
        self._metrics.on_drafted(request, sender, message, now_ns)
        self._planner.on_drafted(message, waiting, now_ns)
        proposal = self._proposer.drafted(request, sender, message, self._remaining_tokens(request))
        if self._alternation.holds(request, self._requests.values()):
            request.held = proposal
            request.wait = wait_for_others(self._planner.estimates, waiting, request.depth, now_ns)
        else:
            self._next.verify(request, proposal, now_ns)

    def _on_resync(self, request: Request, sender: str, now_ns: int) -> None:
        """A worker missed something and gets all committed tokens again. A target's loss begins a new epoch."""
        if sender in request.drafters:
            self._draft_pool.reopen(request, sender)
            self._next.end_wait(request, now_ns)
            return
        request.suspend()
        self._open(request)

    def _on_fault(self, request: Request, sender: str, message: Fault, now_ns: int) -> None:
        if sender in request.drafters:
            self._remove_drafter(request, sender, message.message, now_ns)
        else:
            self._fail(request, message.message)

    def _on_worker_note(self, sender: str, remark: WorkerNote) -> None:
        """Adds the note, once, to every text under way that the sender works for."""
        for request in self._requests.values():
            if self._workers.is_target(sender) or sender in request.drafters:
                request.add_worker_note(sender, remark.message)

    def _update_planner(self) -> None:
        """Tells the planner how many requests run, and whether prompts are still read."""
        self._planner.set_load(len(self._requests), any(request.reads for request in self._requests.values()))

    def _release_side(self, verified: Collection[int], now_ns: int) -> None:
        """Sends the chains that waited for the other half, all of a half together, once one forward of that has ended.

        Of several requests in a half, one is always under way.
        """
        held, all_requests = [one for one in self._requests.values() if one.held is not None], self._requests.values()
        for request in [r for r in held if 1 - r.side in verified or not self._alternation.holds(r, all_requests)]:
            self._next.end_wait(request, now_ns)

    def _remaining_tokens(self, request: Request) -> int:
        return remaining_tokens(request, self._workers.target_context)

    # --- opening, booking, ending ---------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        request.base_len = len(request.tokens)
        request.reads = True
        self._dispatch.open(request, self._remote_prefills.offer(request))
        self._draft_pool.open(request)

    def _remove_drafter(self, request: Request, drafter: str, why: str, now_ns: int) -> None:
        if drafter not in request.drafters:
            return
        if self._settings.simulated:
            self._fail(request, why)
            return
        self._draft_pool.remove(request, drafter)
        self._planner.on_drafter_rejoined(request)
        request.add_note(f"speculation: {why}")
        self._next.end_wait(request, now_ns)

    def _finish(self, request: Request, reason: str) -> None:
        self._close(request)
        until = partial(request.metrics.timings, len(request.admit.tokens))
        notes = [*request.notes, *filter(None, [self._planner.reason(request)])]
        self._emit(RequestEnded(request.id, reason, until(request.made), tuple(notes), until))

    def _fail(self, request: Request, why: str) -> None:
        self._close(request)
        self._emit(RequestFailed(request.id, "WorkerError", why))

    def _close(self, request: Request) -> None:
        del self._requests[request.id]
        self._remote_prefills.forget(request)
        self._dispatch.close(request)
        self._draft_pool.close(request)
        self._update_planner()
        self._recovery.forget(request)
        request.cache.clear()
