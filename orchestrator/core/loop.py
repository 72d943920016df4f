"""The core thread: waits for workers and for the front, and passes their messages to the pool or the scheduler.

Owns no state but the loop. Everything here must answer in microseconds.
"""

from __future__ import annotations

import gc
import logging
import math
from dataclasses import replace
from pathlib import Path

import zmq
from msgspec import structs

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.tuning import PolicyStore
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import WorkerLoss
from outrider.orchestrator.events import Admit, Mailbox, ModelVocabulary, Quit, Stop, ToCore, ToFront, WorkersChanged
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Outcome, Stats

log = logging.getLogger(__name__)

TICK_MS = 250
DEFAULT_PREFILL_FROM = 512  # tokens, unless `outrider tune` measured it


class Core:
    """The core thread's object; `run` is the body of the thread. Construct it on the same thread's context."""

    def __init__(
        self,
        settings: ServeSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        inbox: Mailbox[ToCore],
        outbox: Mailbox[ToFront],
        run_dir: Path,
        auth: CurveAuth | None = None,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._trace = Trace(settings.trace)
        self._fatal = ""
        self.pool = WorkerPool(context, settings, run_dir, auth)
        self._tick_ms = min(TICK_MS, math.ceil(1000 * self.pool.ping_interval_s))
        tunings = tuning.load(tuning.tuning_path(settings))
        self._policy_store = PolicyStore(tuning.memory_path(settings) if settings.memory else None, clock.now())
        prefill_from = next((record.prefill_from for record in tunings if record.prefill_from), DEFAULT_PREFILL_FROM)
        self._scheduler = Scheduler(
            self.pool,
            replace(settings, prefill_from=settings.prefill_from or prefill_from),
            outbox.put,
            self._trace,
            tunings if settings.has_draft_worker or settings.drafts_with_head else (),
            self._policy_store.read(),
        )

    def stats(self, stats: Stats) -> Stats:
        """Returns the front's stats with the core's counts and durations added; may be called on any thread."""
        metrics = self._scheduler.metrics
        return structs.replace(
            stats,
            stale_messages=self._scheduler.stale,
            rejected_frames=stats.rejected_frames + self.pool.rejected,
            dropped_branches=self._scheduler.cache_budget.dropped,
            round_seconds=metrics.rounds.snapshot(),
            verify_seconds=metrics.verifies.snapshot(),
        )

    def run(self) -> None:
        """Runs until Quit; always ends the workers that it started."""
        gc.freeze()  # excludes all present objects from collections: a full one takes milliseconds
        poller = zmq.Poller()
        for socket in (self.pool.socket, self._inbox.wake, self.pool.router.monitor):
            poller.register(socket, zmq.POLLIN)
        try:
            self.pool.start()
            running = True
            while running:
                ready = dict(poller.poll(self._timeout_ms()))
                if self.pool.router.monitor in ready:
                    self.pool.router.update_connections()
                self._receive_from_workers()
                running = self._receive_from_front()
                self._check_workers()
                self.pool.flush()
        finally:
            self._scheduler.close()
            self._policy_store.write(self._scheduler.learned(), clock.now())
            self.pool.close()
            self._trace.close()

    def _timeout_ms(self) -> int:
        deadline_ns = self._scheduler.next_deadline_ns()
        if deadline_ns is None:
            return self._tick_ms
        return min(max(math.ceil((deadline_ns - clock.now()) / MILLISECOND_NS), 0), self._tick_ms)

    def _receive_from_workers(self) -> None:
        """Handles all messages that have arrived, BRANCHES before OUTCOMEs, so that a lookup sees what came in time."""
        arrived = list(self.pool.receive())
        arrived.sort(key=lambda arrival: isinstance(arrival[1], Outcome))
        self._scheduler.handle(arrived, clock.now())
        for worker in self.pool.arrivals():
            if worker.role == "target":
                self._scheduler.on_target_ready()
            elif worker.role == "draft":
                self._scheduler.on_drafter_ready(worker.name)
        self.pool.flush()

    def _receive_from_front(self) -> bool:
        for event in self._inbox.take():
            match event:
                case Admit():
                    self._scheduler.begin(event, clock.now())
                case Stop():
                    self._scheduler.stop(event.request, event.reason)
                case ModelVocabulary():
                    self.pool.set_vocabulary(event)
                case Quit():
                    return False
        return True

    def _check_workers(self) -> None:
        now_ns = clock.now()
        self._scheduler.on_tick(now_ns)
        self.pool.ping(now_ns)
        if not self._scheduler.active and self._policy_store.is_due(now_ns):
            self._policy_store.write(self._scheduler.learned(), now_ns)
        for loss in self.pool.losses(now_ns):
            self._on_loss(loss, now_ns)
        if self.pool.status_changed:
            self.pool.status_changed = False
            self._outbox.put(
                WorkersChanged(
                    workers=self.pool.stats(),
                    stage=self.pool.stage,
                    fatal=self._fatal,
                    notes=tuple(self.pool.notes()),
                    kv_budget=self.pool.kv_budget,
                )
            )

    def _on_loss(self, loss: WorkerLoss, now_ns: int) -> None:
        log.log(logging.INFO if loss.fatal else logging.WARNING, "%s", loss.why)  # the server's exit shows a fatal one
        if loss.worker.role == "target":
            self._scheduler.on_target_lost(loss.why, loss.fatal)
        elif loss.worker.role == "prefill":
            self._scheduler.on_prefill_worker_lost(loss.worker.name)
        else:
            self._scheduler.on_drafter_lost(loss.worker.name, loss.why, now_ns)
        self._fatal = loss.why if loss.fatal else self._fatal
