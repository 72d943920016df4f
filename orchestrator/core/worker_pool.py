"""The workers' socket and processes: starts and admits workers, pings them, and restarts them or gives them up.

Converts frames to (worker name, message) and back, and handles messages that are not about requests. `WorkerRegistry`
decides which workers may join. Knows nothing of requests. Sending never blocks. A message that does not fit is dropped;
messages that matter are sent again.

A worker that never became ready is an error of the server's start; a drafter that can't draft here is left out. A
worker that had been ready is restarted; its successor keeps its name, its memory cost and its abilities. A worker that
joined by itself is not restarted; if it was a target, another may join.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.core.draft_pool import INVALID_KINDS
from outrider.orchestrator.core.worker_registry import (
    EMPTY_HELLO,
    KEY_NOT_ALLOWED,
    LOST_AFTER_PINGS,
    MAX_DEATHS,
    MAX_INVALID_MESSAGES,
    MAX_NAME_LENGTH,
    TARGET_NAME,
    Heartbeat,
    Worker,
    WorkerLoss,
    WorkerRegistry,
)
from outrider.orchestrator.events import KVBudget, ModelVocabulary, kv_budget
from outrider.orchestrator.machine.spawn import spawn_worker
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.sockets import Rate, RateLimiter, RouterSocket
from outrider.protocol import clock, endpoints, messages
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import InvalidRequest, ProtocolError, VersionMismatch, WorkerError
from outrider.protocol.keys import DRAFTER, sender_key
from outrider.protocol.process import physical_memory
from outrider.protocol.schema import clip
from outrider.protocol.worker_link import INCARNATION_BITS, heartbeat_id, routing_id

log = logging.getLogger(__name__)

# A worker has two; the rest are for unknown peers, until they are refused.
MAX_CONNECTIONS = 256
# For a worker that does not read, or for this process.
MAX_QUEUED_MESSAGES = 1024

STOP_GRACE_SECONDS = 5.0
TARGET_WAIT_SECONDS = 600

RESULTS = messages.Outcome | messages.Branches | messages.Drafted | messages.PromptKv
"""The messages that show that a worker has worked for a request."""

# A drafter sends a few messages per forward; an unknown peer sends little besides HELLO.
DRAFTER_RATE, STRANGER_RATE = Rate(20_000, 20_000), Rate(10, 40)


class WorkerPool:
    """The workers of this cluster: their abilities, and the messages to and from them.

    `status_changed`: `stats` or `stage` changed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ServeSettings,
        run_dir: Path,
        auth: CurveAuth | None = None,
    ) -> None:
        awaited = model_digest(Path(settings.model)) if settings.await_target and settings.model else None
        self._registry = WorkerRegistry(settings.can_work_ahead, awaited, auth)
        self._settings, self._auth, self._run_dir = settings, auth, run_dir
        self._memory = physical_memory()
        self.endpoint = f"ipc://{run_dir}/workers"
        self.joining_endpoint = ""
        self.stage = ""
        self.status_changed = False
        self.rejected = 0
        self.ping_interval_s = settings.worker_timeout / LOST_AFTER_PINGS
        self.router = RouterSocket(context, self.endpoint, MAX_CONNECTIONS, MAX_QUEUED_MESSAGES, MAX_QUEUED_MESSAGES)
        self.socket = self.router.socket
        if (joining := settings.workers_endpoint) is not None:
            own = auth.own if auth is not None and settings.requires_keys(joining) else None
            if own is not None:
                endpoints.set_remote_options(self.socket)
            self.joining_endpoint = self.router.open(joining, MAX_CONNECTIONS, own, DRAFTER).endpoint
        self._arrived: list[Worker] = []
        self._dismissed: list[WorkerLoss] = []
        self._outgoing: dict[str, list[messages.Message]] = {}
        self._ping_serial = self._pinged_ns = 0
        self._next_ping_ns = 0
        self._drafters, self._strangers = RateLimiter(DRAFTER_RATE), RateLimiter(STRANGER_RATE)

    def start(self) -> None:
        """Starts the worker processes, which report their progress while they load."""
        settings = self._settings
        if not settings.await_target:
            self._spawn("target", TARGET_NAME)
        for number in range(settings.drafters if settings.has_draft_worker else 0):
            self._spawn("draft", f"draft-{number}")
        for number in range(settings.prefill_workers):
            self._spawn("prefill", f"prefill-{number}")
        if settings.await_target:
            self.stage = f"waiting for a target: outrider worker target --connect {self.endpoint}"
            self.status_changed = True
            log.warning("%s", self.stage)  # without a terminal, or in a narrow one, the stage is not shown in full

    def record_invalid(self, name: str, kind: str) -> None:
        """Counts an invalid message; a drafter that sends too many is dismissed."""
        worker = self._registry.named(name)
        if worker is None or not worker.entered:
            return
        worker.invalid[kind] += 1
        self.status_changed = True
        self.router.warn("%s sent %s", worker, INVALID_KINDS[kind])
        if worker.invalid.total() >= MAX_INVALID_MESSAGES and worker.role == "draft":
            counts = ", ".join(f"{INVALID_KINDS[kind]} ({count})" for kind, count in sorted(worker.invalid.items()))
            why = f"{worker} sent invalid messages: {counts}; disconnected"
            self._dismiss(worker, why)
            if self._auth is not None and worker.key:
                self._auth.refuse(worker.key, why)

    # --- abilities -------------------------------------------------------------------------------------------------

    @property
    def target_context(self) -> int:
        return self.hello(TARGET_NAME).context_length

    @property
    def target_abilities(self) -> messages.Abilities:
        return self.hello(TARGET_NAME).abilities

    @property
    def kv_budget(self) -> KVBudget:
        """The memory for texts in all workers without a key: those with one use other machines' memory."""
        return kv_budget(self._settings.kv_memory, (w.stats() for w in self._registry.all() if not w.key), self._memory)

    def notes(self) -> list[str]:
        """Returns why requests get less speculation than requested, one note for each reason."""
        abilities = self.target_abilities
        drafters = [worker for worker in self._registry.all() if worker.role == "draft" and worker.spawned]
        if not abilities.chains:
            return [clip(f"speculation is off: {abilities.why}")]
        reasons = [f"no draft model: {one.fault}" for one in drafters if one.state in ("refused", "lost")]
        left_out = [note for one in drafters if one.hello for note in one.hello.abilities.left_out]
        return [clip(note) for note in dict.fromkeys((*reasons, *left_out, *abilities.left_out))]

    def drafters(self) -> set[str]:
        """Returns the names of the drafters that are ready."""
        return {worker.name for worker in self._registry.ready("draft")}

    def prefill_workers(self) -> set[str]:
        """Returns the names of the prefill workers that are ready."""
        return {worker.name for worker in self._registry.ready("prefill")}

    def hello(self, name: str) -> messages.Hello:
        """Returns a worker's description; an empty one before it has sent its own."""
        worker = self._registry.named(name)
        return worker.hello if worker and worker.hello else EMPTY_HELLO

    def stats(self) -> tuple[messages.WorkerStats, ...]:
        return tuple(worker.stats() for worker in self._registry.all())

    def set_vocabulary(self, language: ModelVocabulary) -> None:
        """Sets the vocabulary of this cluster, which must also be that of a joining drafter."""
        self._registry.language = language
        self._dismiss_misfits()

    # --- losses and restarts --------------------------------------------------------------------------------------

    def arrivals(self) -> list[Worker]:
        """Returns the workers that can be used from now on: new, restarted, or answering again."""
        arrived, self._arrived = self._arrived, []
        for worker in self._registry.all():
            if worker.state == "frozen" and not worker.heartbeat.is_frozen(self.ping_interval_s):
                worker.state = "ready"
                log.warning("%s answers again", worker)
                arrived.append(worker)
        self.status_changed = self.status_changed or bool(arrived)
        return [worker for worker in arrived if worker.entered]  # some may have been dismissed at once

    def losses(self, now_ns: int) -> list[WorkerLoss]:
        """Returns the workers that can't be used from now on, and restarts those that are due."""
        losses, self._dismissed = [*self._dismissed, *self._find_losses(now_ns), *self._restart(now_ns)], []
        for loss in losses:
            self.status_changed = True
            if loss.gone:
                self._send(routing_id(loss.worker.incarnation), messages.Shutdown(loss.why))
        if losses:
            self._share_memory()
        return losses

    def close(self) -> None:
        """Ends the workers, then closes the socket: first with SHUTDOWN and SIGTERM, and after a grace period for all
        together with SIGKILL."""
        self.flush()
        spawned = [worker.spawned for worker in self._registry.all() if worker.spawned]
        for worker in self._registry.all():
            self._send(routing_id(worker.incarnation), messages.Shutdown())
        for process in spawned:
            process.terminate()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        for process in spawned:
            process.wait(max(deadline - time.monotonic(), 0))
        self.router.close()

    def _find_losses(self, now_ns: int) -> Iterator[WorkerLoss]:
        """Yields the workers newly found lost, which are ended, and newly frozen drafters, which keep running."""
        for worker in self._registry.all():
            if worker.state in ("lost", "refused") or worker.restarts.due_ns is not None:
                continue
            why = worker.loss_reason(self.ping_interval_s)
            if why is not None:
                yield self._give_up(worker, why, now_ns)
            elif worker.state == "ready" and worker.heartbeat.is_frozen(self.ping_interval_s):
                worker.state = "frozen"
                if worker.role == "target":
                    log.warning("%s does not answer; requests wait for it", worker)
                else:  # the caller logs a loss
                    yield WorkerLoss(worker, f"{worker} does not answer; requests continue without it")

    def _restart(self, now_ns: int) -> Iterator[WorkerLoss]:
        """Restarts workers that are due, once their processes are gone. A failed start counts as a death.

        A target that joined by itself is given up instead: no other has joined in its place for `TARGET_WAIT_SECONDS`.
        """
        for before in self._registry.all():
            if not before.restarts.is_due(now_ns) or (before.spawned and before.spawned.poll() is None):
                continue
            if before.spawned is None:
                before.state, before.restarts.due_ns = "lost", None
                before.fault = f"{before.fault}; none has joined in its place for {TARGET_WAIT_SECONDS // 60} minutes"
                yield WorkerLoss(before, before.fault, gone=True, fatal=True)
                continue
            before.restarts.begun()
            log.warning("restarting %s", before)
            try:
                self._spawn(before.role, before.name, before)
            except (WorkerError, InvalidRequest) as error:
                yield self._schedule(before, str(error), now_ns)

    def _dismiss(self, worker: Worker, why: str) -> None:
        """Disconnects a worker and never restarts it; `losses` will report it."""
        self._registry.ban_worker(worker, why)
        worker.state, worker.fault = "refused" if worker.spawned else "lost", why
        if worker.spawned:
            worker.spawned.kill()
        self._dismissed.append(WorkerLoss(worker, why, gone=True))

    def _give_up(self, worker: Worker, why: str, now_ns: int) -> WorkerLoss:
        """Ends a worker's process, and schedules a restart if it was started here and had been ready."""
        self._registry.drop_routing_ids(worker)
        worker.state, worker.fault = "lost", why
        if worker.spawned is None:
            if worker.role == "target":
                worker.state, worker.restarts.due_ns = "restarting", now_ns + TARGET_WAIT_SECONDS * SECOND_NS
            return WorkerLoss(worker, why, gone=True)
        code = worker.spawned.poll()
        worker.spawned.kill()
        if worker.hello is None:
            return WorkerLoss(worker, why, gone=True, fatal=True)
        failed_load = why if not worker.entered_ns and code is not None and code > 0 else ""
        return self._schedule(worker, why, now_ns, worker.is_steady(now_ns), failed_load)

    def _schedule(
        self, worker: Worker, why: str, now_ns: int, was_steady: bool = False, failed_load: str = ""
    ) -> WorkerLoss:
        """Schedules a restart, unless the worker has died too often; see `Restarts.died`."""
        needed, restarts = worker.role == "target", worker.restarts
        will_restart = restarts.died(now_ns, was_steady, needed, failed_load)
        if restarts.deaths >= MAX_DEATHS:
            seconds = restarts.wait_ns / SECOND_NS
            then = f"the next start is in {seconds:g} s" if will_restart else "it is not started again"
            why = f"{why}; it died {restarts.deaths} times in a row, and {then}"
        worker.state, worker.fault = "restarting" if will_restart else "lost", why
        return WorkerLoss(worker, why, gone=True, fatal=needed and not will_restart)

    def _spawn(self, role: str, name: str, before: Worker | None = None) -> None:
        incarnation = secrets.randbits(INCARNATION_BITS)
        spawned = spawn_worker(role, name, self.endpoint, self._settings, self._run_dir, incarnation)
        worker = Worker(name, role, incarnation, spawned, begun_ns=clock.now())
        if before is not None:
            worker.state, worker.hello, worker.restarts = "restarting", before.hello, before.restarts
            load_s = (before.entered_ns - before.begun_ns) / SECOND_NS if before.entered_ns else 0.0
            worker.heartbeat.expected_s = load_s or before.heartbeat.expected_s
        self._registry.assign(worker)

    # --- messages -------------------------------------------------------------------------------------------------

    def send_target(self, message: messages.Message) -> None:
        self.send_worker(TARGET_NAME, message)

    def send_worker(self, name: str, message: messages.Message) -> None:
        """Queues a message to a worker until the next `flush`; it is dropped if the worker is gone by then."""
        self._outgoing.setdefault(name, []).append(message)

    def flush(self) -> None:
        """Sends the queued messages, those of each worker together."""
        for name, queued in self._outgoing.items():
            worker = self._registry.named(name)
            if worker is not None and worker.entered:
                self._send(routing_id(worker.incarnation), *queued)
        self._outgoing.clear()

    def flush_and_yield(self) -> None:
        """Flushes, and yields the processor: on a machine of two cores the receiver may be waiting for it."""
        self.flush()
        os.sched_yield()

    def receive(self) -> Iterator[tuple[str, messages.Message]]:
        """Yields (worker name, message) for the messages about requests; handles the others; never blocks."""
        for first, frames in self.router.receive_waiting():
            identity = first.bytes
            worker = self._registry.at(identity)
            if worker is not None and self._auth is not None and worker.key != sender_key(first):
                self.rejected += 1  # the holder of this routing id joined with another key, or without one
                continue
            within_rate = self._within_rate(identity, worker, frames)
            for message in self._decode(identity, worker, frames) if within_rate else ():
                match message:
                    case messages.Hello():
                        self._on_hello(identity, message, sender_key(first))
                        worker = self._registry.at(identity)
                    case _ if worker is None:
                        self.rejected += 1
                        log.info("dropped a %s from an unknown peer", type(message).__name__)
                    case messages.CacheReport(use=use):
                        worker.cache, self.status_changed = use, True
                    case messages.Pong():
                        self._on_pong(worker, message)
                    case messages.Loading(stage=stage):
                        self.stage, self.status_changed = f"{worker.role}: {stage}", True
                        worker.heartbeat.unanswered = 0
                    case messages.Fault(request=None, message=why, dispensable=dispensable):
                        worker.fault = why  # it will end, and `losses` will report it
                        if dispensable and worker.role != "target" and not worker.entered:
                            worker.state, self.status_changed = "refused", True
                    case _:
                        worker.worked = worker.worked or isinstance(message, RESULTS)
                        yield worker.name, message if worker.spawned else worker.clock.to_local(message, clock.now())

    def ping(self, now_ns: int) -> None:
        if now_ns < self._next_ping_ns:
            return
        self._next_ping_ns = now_ns + int(self.ping_interval_s * SECOND_NS)
        self._ping_serial += 1
        self._pinged_ns = clock.now()
        for worker in self._registry.all():
            worker.heartbeat.unanswered += 1
            if worker.entered and worker.key and not self._registry.is_key_allowed(worker.role, worker.key):
                self._dismiss(worker, f"{worker} is dismissed: {KEY_NOT_ALLOWED}")
            elif worker.entered:
                self._send(heartbeat_id(routing_id(worker.incarnation)), messages.Ping(self._ping_serial))

    def _on_pong(self, worker: Worker, pong: messages.Pong) -> None:
        is_newest = pong.serial == self._ping_serial
        worker.heartbeat.on_pong(pong.progress, is_newest, pong.expected_ms / 1000)
        if is_newest and pong.clock_ns:
            self.status_changed = self.status_changed or not worker.clock.round_trip_ns
            worker.clock.observe(self._pinged_ns, pong.clock_ns, clock.now())

    def _send(self, identity: bytes, *together: messages.Message) -> bool:
        """Sends messages; they are dropped if the worker does not read or is gone. Returns False if it is gone."""
        try:
            self.socket.send_multipart([identity, *encode_all(together)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EAGAIN:
                return False
            self.router.warn("a worker has %d unread messages, the maximum; later ones are lost", MAX_QUEUED_MESSAGES)
        return True

    def _on_hello(self, identity: bytes, hello: messages.Hello, key: str) -> None:
        """Admits a worker that is ready, spawned or joining, or refuses it. A repeated HELLO is answered again, because
        WELCOME may have been lost."""
        worker = self._registry.at(identity)
        if worker is not None and worker.state not in ("starting", "restarting") and hello != worker.hello:
            self.rejected += 1
            return
        holder = self._registry.named(hello.name) if worker is None else None
        if holder and holder.entered and not holder.spawned and holder.key == key and not self._welcome(holder):
            holder.fault = "its connection is closed, and another process has its name"
            return  # `losses` gives it up, and the next HELLO gets the name
        why = self._registry.refusal(identity, hello, key) if worker is None else worker.other_model(hello)
        if why is not None:
            self.rejected += 1
            self.router.warn("refused %r, a %s worker: %s", hello.name[:MAX_NAME_LENGTH], hello.role, why)
            self._send(identity, messages.Shutdown(why))
            if worker is not None:
                worker.fault = why  # it will end, and `losses` will report it
            return
        if worker is None:
            worker = self._registry.join(hello, key)
            self.router.warn("%s has joined, with the model %s", worker, hello.model)
        worker.hello, worker.state, worker.fault, worker.heartbeat = hello, "ready", "", Heartbeat()
        worker.entered_ns, worker.kv_limit = clock.now(), 0
        self._arrived.append(worker)
        self._welcome(worker)
        self._share_memory()
        self.status_changed = True
        self._dismiss_misfits()

    def _welcome(self, worker: Worker) -> bool:
        """Answers HELLO; a worker that has been answered drops this. Returns False if its connection is closed."""
        return self._send(
            routing_id(worker.incarnation), messages.Welcome(worker.name, round(1000 * self.ping_interval_s))
        )

    def _dismiss_misfits(self) -> None:
        """Dismisses workers that joined before the target was known and can't work for it."""
        for worker in self._registry.all():
            why = self._registry.misfit_reason(self.hello(worker.name)) if worker.entered else ""
            if why:
                self._dismiss(worker, f"{worker} is dismissed: {why}")

    def _share_memory(self) -> None:
        """Sends all workers their share of the memory for texts."""
        budget = self.kv_budget
        for worker in self._registry.all():
            share = budget.share(worker.hello.kv, self.target_context) if worker.hello is not None else 0
            if worker.entered and share != worker.kv_limit:
                worker.kv_limit = share
                self._send(routing_id(worker.incarnation), messages.KvMemory(share, self._settings.prompt_cache))

    def _within_rate(self, identity: bytes, worker: Worker | None, frames: Sequence[bytes]) -> bool:
        """Whether the sender is within its rate; messages over it are not decoded."""
        if worker is not None and worker.role != "draft":
            return True
        allowance = self._strangers if worker is None else self._drafters
        if allowance.allow(identity, frames, clock.now()):
            return True
        self.rejected += 1
        if worker is not None:
            self.record_invalid(worker.name, "flood")
        else:
            self.router.warn(
                "an unknown peer sends too many messages to the workers' socket; dropping more than %d a second",
                STRANGER_RATE.per_second,
            )
        return False

    def _decode(self, identity: bytes, worker: Worker | None, frames: Sequence[bytes]) -> list[messages.Message]:
        try:
            return decode_all(frames)
        except ProtocolError as error:
            self.rejected += 1
            log.info("dropped a frame on the workers' socket: %s", error)
            if worker is not None:
                self.record_invalid(worker.name, "frame")
            elif isinstance(error, VersionMismatch):
                self._send(identity, messages.Shutdown(str(error)))  # its header shows that the versions differ
            return []
