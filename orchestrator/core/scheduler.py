"""The rounds of speculative speculative decoding (paper algorithm 1, the verifier's side).

AR, SD and SSD are this one loop with different proposals. An outcome is handled in this order: integer checks, the
lookup, the next VERIFY, COMMIT, and only then the event for the front, which makes the text. The scheduler owns the
running requests, and knows tokens and integers only. Time is passed in.

While there is no target the requests wait, and continue on its replacement, all together. If the target dies again
before a request has got a token, that request is a suspect; on the next replacement suspects run one at a time, with no
other request, until their first token. A request that kills the target alone fails, and the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from outrider.orchestrator.core.draft_pool import LATE, DraftPool
from outrider.orchestrator.core.metrics import RequestMetrics, RoundMetrics, Trace
from outrider.orchestrator.core.next_round import NextRound
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.acceptance import classify_text
from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.core.remote_prefills import RemotePrefills
from outrider.orchestrator.core.request import (
    CacheBudget,
    DrafterState,
    DraftState,
    PlanState,
    Request,
    SequenceState,
    SettledRound,
    SpeculationCache,
)
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import TARGET_NAME
from outrider.orchestrator.events import Admit, Committed, RequestBegan, RequestEnded, ToFront
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import messages
from outrider.protocol.clock import OUTCOME_TIMEOUT_NS
from outrider.protocol.ngrams import INDEX_PIECE_TOKENS, NgramTable

# After so many deaths of the target in a row without a token, a request runs alone (a suspect), or fails.
SUSPECT_AFTER_DEATHS, FAIL_AFTER_DEATHS = 2, 3


class Scheduler:
    """Owns the requests in flight, and decides what each verifies next."""

    def __init__(
        self,
        workers: WorkerPool,
        settings: ServeSettings,
        emit: Callable[[ToFront], None],
        trace: Trace,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
    ) -> None:
        """`tunings` are tune's for this pair, `memory` what an earlier server `learned`; `emit` sends to the front."""
        self.stale = 0
        self._workers = workers
        self.cache_budget = CacheBudget()
        self._settings = settings
        self._emit = emit
        self.metrics = RoundMetrics(trace)
        self._planner = Planner(settings, tunings, memory, lambda: workers.target_abilities)
        self._draft_pool = DraftPool(workers, self._planner.estimates, settings.full_depth)
        self._ngram_table = NgramTable.load(settings.ngram_table) if settings.ngram_table else None
        self._requests: dict[str, Request] = {}
        self._next_round = NextRound(workers, self._draft_pool, self._planner, settings.full_depth)
        self._remote_prefills = RemotePrefills(workers, self._next_round.send_again, settings.prefill_from or 1)
        self._has_target = True
        self.learned = self._planner.learned

    @property
    def active(self) -> int:
        return len(self._requests)

    # --- events of the front --------------------------------------------------------------------------------------

    def begin(self, admit: Admit, now_ns: int) -> None:
        """Begins a request: OPEN to the target and to the drafters, which all read the prompt at once."""
        self._planner.set_load(len(self._requests) + 1)
        request = self._requests[admit.request] = self._create_request(admit, now_ns)
        self._open_waiting()
        self._workers.flush_and_yield()
        if self._settings.ngrams and request.admit.mode != "ar":
            request.sequence.ngrams.table, request.sequence.ngrams.ends = self._ngram_table, admit.eos
            request.sequence.ngrams.extend(request.sequence.tokens)
        self._emit(RequestBegan(request.id, request.admit.mode, tuple(request.sequence.notes)))

    def stop(self, request_id: str, reason: str) -> None:
        """Ends a request whose text is complete or unwanted; the round in flight is cancelled."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def close(self) -> None:
        for request in list(self._requests.values()):
            self._finish(request, "cancelled")

    # --- arrivals and losses of workers ---------------------------------------------------------------------------

    def on_drafter_lost(self, name: str, why: str, now_ns: int) -> None:
        """Removes a drafter; its requests continue with the drafters that are left, or without."""
        for request in list(self._requests.values()):
            if name in request.draft.drafters:
                self._remove_drafter(request, name, why, True, now_ns)
        self._draft_pool.forget(name)

    def on_drafter_ready(self, name: str) -> None:
        """Adds a drafter to all requests that it may draft for, in the middle of their texts."""
        for request in self._requests.values():
            if self._draft_pool.add(request, name):
                request.sequence.add_note(f"speculation: {name} drafts again")
                self._planner.on_drafters_changed(request)
                if request.round.is_open:
                    self._draft_pool.reopen(request, name)

    def on_prefill_worker_lost(self, name: str) -> None:
        """Lets the target read the prompts that the lost worker was reading."""
        self._remote_prefills.on_worker_lost(name, self._requests)

    def on_target_lost(self, why: str, for_good: bool) -> None:
        """Lets requests wait for a new target. One that killed it alone fails; all fail if none will come."""
        message = f"{why}, for the third time in a row with this request, the last time with this request alone"
        self._has_target = False
        for request in list(self._requests.values()):
            sequence = request.sequence
            if for_good:
                self._fail(request, why)
            elif request.round.is_open:
                self._remote_prefills.forget(request)
                self._next_round.suspend(request)
                sequence.add_note(f"the text continued after a pause: {why}")
                sequence.deaths += 1
                request.metrics.resumed += 1
                if sequence.deaths >= FAIL_AFTER_DEATHS:
                    self._fail(request, message)

    def on_target_ready(self) -> None:
        """Continues the requests on the new target, from their committed tokens."""
        for request in self._requests.values():
            self._planner.on_drafters_changed(request)  # the new target may have other in-process drafters
        self._has_target = True
        self._open_waiting()

    # --- messages of workers --------------------------------------------------------------------------------------

    def handle(self, arrived: Iterable[tuple[str, messages.Message]], now_ns: int) -> None:
        """Handles workers' messages that came together; a stale or invalid one is dropped and counted.

        Replies leave before metrics are written and events go to the front.
        """
        settled: list[SettledRound] = []
        for sender, message in arrived:
            self._handle_one(sender, message, now_ns, settled)
        if settled:
            self._workers.flush_and_yield()
        for round_ in settled:
            self._record(round_, now_ns)

    def _handle_one(self, sender: str, message: messages.Message, now_ns: int, settled: list[SettledRound]) -> None:
        if isinstance(message, messages.WorkerNote):
            self._on_worker_note(sender, message)
            return
        request = self._requests.get(getattr(message, "request", None) or "")
        workers, hello = self._workers, self._workers.hello(sender)
        if hello.role == "prefill":
            self.stale += not self._remote_prefills.on_message(request, sender, message)
            return
        refusal = self._draft_pool.sent.refusal(request, sender == TARGET_NAME, sender, message, hello.vocab_size)
        if refusal or request is None:
            self.stale += 1
            if refusal != LATE:
                workers.record_invalid(sender, refusal)
            return
        if isinstance(message, messages.Outcome | messages.Branches | messages.Drafted):
            request.metrics.on_peak_memory(sender, message.peak_bytes)
        match message:
            case messages.Outcome():
                settled += self._on_outcome(request, message, now_ns)
            case messages.Features():
                for name in request.draft.drafters:
                    if workers.hello(name).features:  # it reads them
                        workers.send_worker(name, message)
            case messages.Branches():
                self._on_branches(request, sender, message, now_ns)
            case messages.Drafted():
                self._on_drafted(request, sender, message, now_ns)
            case messages.Prefilled():
                self._on_prefilled(request, message, now_ns)
            case messages.Resync():
                self._on_resync(request, sender, now_ns)
            case messages.Fault() if sender in request.draft.drafters:
                self._remove_drafter(request, sender, message.message, False, now_ns)
            case messages.Fault():
                self._fail(request, message.message)

    def _on_prefilled(self, request: Request, message: messages.Prefilled, now_ns: int) -> None:
        if not request.round.epoch:
            request.metrics.cached_tokens = request.metrics.cached_tokens or message.cached
        request.sequence.last_heard_ns = now_ns
        self._remote_prefills.on_progress(request, message)
        if not request.generated:
            self._emit(messages.Progress(request.id, message.done, message.total))

    def next_deadline_ns(self) -> int | None:
        """Returns when `on_tick` must be called at the latest, or None; 0: at once, to index a prompt's n-grams."""
        requests = self._requests.values()
        if any(request.sequence.ngrams.is_behind for request in requests):
            return 0
        return min((request.round.wait.deadline_ns for request in requests if request.round.wait), default=None)

    def on_tick(self, now_ns: int) -> None:
        """Ends overdue waits, with the branch as deep as it is or with a plain step; sends a round again if its outcome
        may be lost; indexes a piece of a long prompt."""
        behind = next((r.sequence.ngrams for r in self._requests.values() if r.sequence.ngrams.is_behind), None)
        if behind is not None:
            behind.index_more(INDEX_PIECE_TOKENS)
        for request in list(self._requests.values()):
            sequence, wait = request.sequence, request.round.wait
            if wait and now_ns >= wait.deadline_ns:
                self._draft_pool.expire(request, now_ns)
                self._next_round.end_wait(request, now_ns)
            elif not wait and request.round.is_open and now_ns - sequence.last_heard_ns >= OUTCOME_TIMEOUT_NS:
                sequence.last_heard_ns = now_ns
                self._remote_prefills.forget(request)
                self._next_round.send_again(request)

    def _on_outcome(self, request: Request, outcome: messages.Outcome, now_ns: int) -> list[SettledRound]:
        sequence, round_, deaths = request.sequence, request.round, request.sequence.deaths
        proposal = round_.proposal.as_verified(outcome)
        nodes = proposal.nodes(outcome)
        # During a wait there are more tokens than the round had that has ended.
        is_current = (outcome.round, outcome.base_len) == (round_.number, len(sequence.tokens))
        if not is_current or nodes is None:
            self.stale += 1
            return []
        if round_.reads:
            self._remote_prefills.forget(request)
        kept, reason = request.truncate_at_end([*(proposal.chain[node] for node in nodes), outcome.bonus])
        settled = SettledRound(
            request, round_.number, request.plan, proposal, round_.reads, outcome, nodes, tuple(kept), reason,
            round_.decided, round_.waited, round_.covered,
        )  # fmt: skip
        sequence.append(kept, now_ns)
        if reason is not None:
            del self._requests[request.id]  # `_record` closes it
        elif deaths >= SUSPECT_AFTER_DEATHS:  # it continues when all suspects were tried
            self._next_round.suspend(request)
            self._open_waiting()
        else:
            self._next_round.on_outcome(settled, now_ns)
        return [settled]

    def _record(self, settled: SettledRound, now_ns: int) -> None:
        """Records a round in metrics and planner, and sends its tokens to the front."""
        request, outcome, kept = settled.request, settled.outcome, settled.kept
        report = self.metrics.on_outcome(settled, now_ns)
        self._planner.on_outcome(settled)
        note = self._planner.check_in_process_drafter(settled)
        if note:
            request.sequence.add_note(note)
        logprobs = outcome.logprobs.part(0, len(kept)) if outcome.logprobs is not None else None
        origins = settled.proposal.origins(settled.nodes)[: len(kept)] if request.admit.origins else None
        rounds = (report,) if report is not None else None
        self._emit(Committed(request.id, kept, logprobs, origins, rounds, outcome.prompt_logprobs))
        if settled.reason is not None:
            self._finish(request, settled.reason)

    def _on_branches(self, request: Request, sender: str, message: messages.Branches, now_ns: int) -> None:
        self.metrics.on_drafts(request, sender, message, now_ns)
        if self._draft_pool.on_branches(request, sender, message, now_ns):
            self._next_round.on_branches(request, message.final, now_ns)
        else:
            self.stale += 1

    def _on_drafted(self, request: Request, sender: str, message: messages.Drafted, now_ns: int) -> None:
        if not self._draft_pool.on_drafted(request, sender, message, now_ns):
            self.stale += 1
            return
        self.metrics.on_drafts(request, sender, message, now_ns)
        self._next_round.on_drafted(request, sender, message, now_ns)

    def _on_resync(self, request: Request, sender: str, now_ns: int) -> None:
        """Sends all committed tokens again to a worker that missed some; for the target a new epoch begins."""
        if sender in request.draft.drafters:
            self._draft_pool.reopen(request, sender)
            self._next_round.end_wait(request, now_ns)
            return
        self._next_round.suspend(request)
        self._open(request)

    def _on_worker_note(self, sender: str, note: messages.WorkerNote) -> None:
        """Adds the note to every request that the sender works for, at most one from each sender."""
        for request in self._requests.values():
            has_note = any(words.startswith(f"{sender}: ") for words in request.sequence.notes)
            if not has_note and sender in (TARGET_NAME, *request.draft.drafters):
                request.sequence.add_note(f"{sender}: {note.message}")

    # --- opening and ending ---------------------------------------------------------------------------------------

    def _create_request(self, admit: Admit, now_ns: int) -> Request:
        """Returns a new request, with its plan, its drafters and notes about them; its n-grams are still empty."""
        workers, planner = self._workers, self._planner
        worker_notes = workers.notes() if admit.mode != "ar" else []
        if not workers.target_abilities.chains:
            admit = replace(admit, mode="ar")
        drafters = workers.drafters() if admit.can_use_draft_workers else set()
        tokens = [*admit.tokens, *admit.resume_tokens]
        kind = classify_text(tokens, admit.sampling.grammar is not None, admit.code)
        text = planner.open_text(kind, admit.sampling.temp == 0)
        plan, notes = planner.first_plan(admit, len(drafters), text)
        return Request(
            admit,
            SequenceState(tokens, workers.target_context, last_heard_ns=now_ns, notes=[*worker_notes, *notes]),
            DraftState({name: DrafterState() for name in sorted(drafters)}, SpeculationCache(self.cache_budget)),
            PlanState(plan, text),
            RequestMetrics(now_ns, admit.rounds),
            takes_trees=planner.merges and workers.target_abilities.trees and not admit.sampling.is_residual,
        )

    def _open_waiting(self) -> None:
        """Opens the requests that may be on the target now: a suspect by itself, or all."""
        suspects = [r for r in self._requests.values() if r.sequence.deaths >= SUSPECT_AFTER_DEATHS]
        if not self._has_target or any(request.round.is_open for request in suspects):
            return
        waiting = [request for request in self._requests.values() if not request.round.is_open]
        for request in suspects[:1] or waiting:
            self._open(request)

    def _open(self, request: Request) -> None:
        self._next_round.open(request, self._remote_prefills.offer(request))

    def _remove_drafter(self, request: Request, drafter: str, why: str, was_lost: bool, now_ns: int) -> None:
        self._draft_pool.remove(request, drafter, was_lost)
        self._planner.on_drafters_changed(request)
        request.sequence.add_note(f"speculation: {why}")
        self._next_round.end_wait(request, now_ns)

    def _finish(self, request: Request, reason: str) -> None:
        self._close(request)
        timings = partial(request.metrics.timings, len(request.admit.tokens))
        generated = request.generated - len(request.admit.resume_tokens)  # by this server
        notes = [*request.sequence.notes, *filter(None, [self._planner.reason(request)])]
        self._emit(RequestEnded(request.id, reason, timings(generated), tuple(notes), timings))

    def _fail(self, request: Request, why: str) -> None:
        self._close(request)
        self._emit(messages.Failed(request.id, "WorkerError", why))

    def _close(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        self._remote_prefills.forget(request)
        self._workers.send_target(messages.Close(request.id))
        self._draft_pool.close(request)
        self._planner.set_load(len(self._requests))
        self._open_waiting()
