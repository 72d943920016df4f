"""The workers' socket and who is on it: registry, heartbeats, and the death or freezing of a worker.

Turns frames into (worker name, message) and back. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from outrider.orchestrator.machine.spawn import SpawnedWorker, spawn_worker
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.codec import decode, encode
from outrider.protocol.endpoints import bind
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Fault, Hello, Loading, Message, Ping, Pong, Shutdown, WorkerStats
from outrider.protocol.worker_link import HEARTBEAT_SUFFIX

log = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000
PING_EVERY_NS = SECOND_NS
# A worker whose heartbeat thread is silent, or whose busy thread stands still, for this long counts as frozen.
SILENCE_LIMIT_NS = 8 * SECOND_NS
STANDSTILL_LIMIT_NS = 60 * SECOND_NS
STOP_GRACE_SECONDS = 5.0


@dataclass(slots=True)
class Worker:
    """A worker as the pool knows it. `state` is starting, ready, lost or frozen."""

    name: str
    role: str
    spawned: SpawnedWorker | None
    state: str = "starting"
    hello: Hello | None = None
    fault: str = ""
    heard_ns: int = 0
    progress: int = -1
    moved_ns: int = 0

    def stats(self) -> WorkerStats:
        hello = self.hello
        pid = hello.pid if hello else self.spawned.pid if self.spawned else 0
        if hello is None:
            return WorkerStats(self.role, self.name, self.state, pid, "", "", 0, 0, 0, 0, self.fault)
        return WorkerStats(
            self.role,
            self.name,
            self.state,
            pid,
            hello.backend,
            hello.model,
            hello.vocab_size,
            hello.context_length,
            hello.parameters,
            hello.weight_bytes,
            hello.note,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is gone. `started`: it had been ready before."""

    worker: Worker
    why: str
    started: bool


class WorkerPool:
    """Spawns this cluster's workers and talks to all that say HELLO on `endpoint`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: ServeSettings, run_dir: Path) -> None:
        self.endpoint = f"ipc://{run_dir}/workers"
        self.stage = ""
        self.rejected = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._bound = bind(self.socket, self.endpoint)
        self._settings = settings
        self._run_dir = run_dir
        self._workers: dict[str, Worker] = {}
        self._ping_serial = 0
        self._next_ping_ns = 0

    def start(self) -> None:
        """Starts the worker processes; they report as they load."""
        self._spawn("target", "target-0")
        if self._settings.has_draft_worker:
            self._spawn("draft", "draft-0")

    # --- who there is ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Every worker this cluster was meant to have is there."""
        spawned = [worker for worker in self._workers.values() if worker.spawned]
        return bool(spawned) and all(worker.state == "ready" for worker in spawned)

    @property
    def target_context(self) -> int:
        hello = self._target().hello
        return hello.context_length if hello else 0

    def is_target(self, name: str) -> bool:
        worker = self._workers.get(name)
        return worker is not None and worker.role == "target"

    def drafters(self) -> set[str]:
        return {worker.name for worker in self._workers.values() if worker.role == "draft" and worker.state == "ready"}

    def has_target(self) -> bool:
        return self._target().state == "ready"

    def stats(self) -> tuple[WorkerStats, ...]:
        return tuple(worker.stats() for worker in self._workers.values())

    # --- talking --------------------------------------------------------------------------------------------------

    def send_target(self, message: Message) -> None:
        self._send(self._target().name, message)

    def send_drafter(self, name: str, message: Message) -> None:
        self._send(name, message)

    def let_go(self) -> None:
        """Gives the core away: on a machine of two, whoever waits for what was sent waits for this very core."""
        os.sched_yield()

    def receive(self) -> Iterator[tuple[str, Message]]:
        """Every message waiting, without blocking; the pool keeps those that are about the workers themselves."""
        while True:
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                name, message = identity.decode(), decode(frames)
            except (ProtocolError, UnicodeDecodeError) as error:
                self.rejected += 1
                log.warning("dropped a frame on the workers' socket: %s", error)
                continue
            yield name.removesuffix(HEARTBEAT_SUFFIX), message

    def hello(self, name: str, hello: Hello, now_ns: int) -> None:
        """A worker is ready: one that was spawned, or, unless the target drafts for itself, a drafter that joins."""
        worker = self._workers.setdefault(name, Worker(name, hello.role, None))
        foreign = worker.spawned is None and (hello.role == "target" or self._settings.colocate)
        if worker.role != hello.role or foreign:
            del self._workers[name]
            log.warning("turned %s away: this cluster has no place for a %s that it did not spawn", name, hello.role)
            self._send(name, Shutdown())
            return
        worker.hello, worker.state = hello, "ready"
        worker.heard_ns = worker.moved_ns = now_ns

    def loading(self, message: Loading) -> None:
        self.stage = f"{message.role}: {message.stage}"

    def fault(self, name: str, message: Fault) -> None:
        """The worker itself can't go on; it will end, and `losses` will tell."""
        if name in self._workers:
            self._workers[name].fault = message.message

    def pong(self, name: str, message: Pong, now_ns: int) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.heard_ns = now_ns
        if message.progress != worker.progress:
            worker.progress, worker.moved_ns = message.progress, now_ns

    def ping(self, now_ns: int) -> None:
        if now_ns < self._next_ping_ns:
            return
        self._next_ping_ns = now_ns + PING_EVERY_NS
        self._ping_serial += 1
        for worker in self._workers.values():
            if worker.state == "ready":
                self._send(worker.name + HEARTBEAT_SUFFIX, Ping(self._ping_serial))

    def losses(self, now_ns: int) -> list[Loss]:
        """Workers newly found dead or frozen. A frozen one that was spawned here is ended."""
        lost = []
        for worker in self._workers.values():
            why = self._why_lost(worker, now_ns) if worker.state in ("starting", "ready") else None
            if why is not None:
                lost.append(Loss(worker, why, worker.state == "ready"))
                worker.state = "frozen" if worker.spawned and worker.spawned.exit_code() is None else "lost"
                worker.fault = why
                if worker.spawned and worker.state == "frozen":
                    worker.spawned.kill()
        return lost

    def close(self) -> None:
        """Ends the workers in order, then the socket."""
        spawned = [worker.spawned for worker in self._workers.values() if worker.spawned]
        for worker in self._workers.values():
            self._send(worker.name, Shutdown())
        for process in spawned:
            process.terminate()
        for process in spawned:
            process.wait(STOP_GRACE_SECONDS)
        self._bound.close()

    def _why_lost(self, worker: Worker, now_ns: int) -> str | None:
        code = worker.spawned.exit_code() if worker.spawned else None
        if worker.spawned and code is not None:
            tail = worker.spawned.log_tail()
            return worker.fault or f"{worker.role} worker {worker.name} ended with code {code}" + (
                f": {tail}" if tail else ""
            )
        if worker.state == "ready" and now_ns - worker.heard_ns > SILENCE_LIMIT_NS:
            return f"{worker.role} worker {worker.name} has not answered for {SILENCE_LIMIT_NS // SECOND_NS} s"
        if worker.state == "ready" and now_ns - worker.moved_ns > STANDSTILL_LIMIT_NS:
            return f"{worker.role} worker {worker.name} has not moved for {STANDSTILL_LIMIT_NS // SECOND_NS} s"
        return None

    def _spawn(self, role: str, name: str) -> None:
        spawned = spawn_worker(role, name, self.endpoint, self._settings, self._run_dir)
        self._workers[name] = Worker(name, role, spawned)

    def _target(self) -> Worker:
        return self._workers["target-0"]

    def _send(self, name: str, message: Message) -> None:
        frames = encode(message)
        self.socket.send(name.encode(), zmq.SNDMORE)
        for frame in frames[:-1]:
            self.socket.send(frame, zmq.SNDMORE)
        self.socket.send(frames[-1])
