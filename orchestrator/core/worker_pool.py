"""The workers' socket: starts this cluster's workers, lets in those that may join, and finds who is dead or frozen.

Turns frames into (worker name, message) and back; what workers say about themselves stays here. A frozen drafter is
done without until it is heard again; a frozen target is waited for. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from outrider.orchestrator.core.places import Places
from outrider.orchestrator.core.pulse import SILENT, Pulse
from outrider.orchestrator.core.worker import Loss, Worker
from outrider.orchestrator.doorkeeper import Doorkeeper
from outrider.orchestrator.kv_room import KvRoom, kv_room
from outrider.orchestrator.machine.memory import physical
from outrider.orchestrator.machine.spawn import spawn_worker
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.abilities import Abilities
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import (
    CacheReport,
    Fault,
    Hello,
    KvMemory,
    Loading,
    Message,
    Ping,
    Pong,
    Shutdown,
    Welcome,
    WorkerStats,
)
from outrider.protocol.worker_link import INCARNATION_BITS, heartbeat_of, routing_id

log = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000
STOP_GRACE_SECONDS = 5.0
# A worker has two; the rest is for strangers, until they are turned away.
MAX_CONNECTIONS = 256
TARGET = "target-0"


class WorkerPool:
    """Spawns this cluster's workers and talks to all that have a place in it. `news`: `stats` or `stage` changed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: ServeSettings, run_dir: Path) -> None:
        self.endpoint = f"ipc://{run_dir}/workers"
        self.stage = ""
        self.news = False
        self.rejected = 0
        self.seconds_a_ping = settings.worker_timeout / SILENT
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.door = Doorkeeper(self.socket, self.endpoint, MAX_CONNECTIONS)
        self._settings = settings
        self._run_dir = run_dir
        self._places = Places(drafters_may_join=not settings.colocate)
        self._going: dict[str, list[Message]] = {}
        self._ping_serial = 0
        self._next_ping_ns = 0
        self._memory = physical()

    def start(self) -> None:
        """Starts the worker processes; they report as they load."""
        self._spawn("target", TARGET)
        if self._settings.has_draft_worker:
            self._spawn("draft", "draft-0")

    # --- who there is ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Every worker this cluster was meant to have is there."""
        spawned = [worker for worker in self._places.all() if worker.spawned]
        return self.has_target() and all(worker.state in ("ready", "refused") for worker in spawned)

    @property
    def target_context(self) -> int:
        target = self._places.named(TARGET)
        return target.hello.context_length if target and target.hello else 0

    @property
    def target_abilities(self) -> Abilities:
        target = self._places.named(TARGET)
        return target.hello.abilities if target and target.hello else Abilities()

    @property
    def kv_room(self) -> KvRoom:
        """What texts may take in all workers that are there."""
        return kv_room(self._settings.kv_memory, self.stats(), self._memory)

    def notes(self) -> list[str]:
        """Why requests get less speculation than was asked for, a sentence each."""
        off = [] if self.target_abilities.chains else [self.target_abilities.why]
        refused = [worker.fault for worker in self._places.all() if worker.state == "refused"]
        return [f"speculation is off: {why}" for why in off] or [f"no draft model: {why}" for why in refused]

    def is_target(self, name: str) -> bool:
        worker = self._places.named(name)
        return worker is not None and worker.role == "target"

    def drafters(self) -> set[str]:
        return {worker.name for worker in self._places.all() if worker.role == "draft" and worker.state == "ready"}

    def has_target(self) -> bool:
        target = self._places.named(TARGET)
        return target is not None and target.entered

    def stats(self) -> tuple[WorkerStats, ...]:
        return tuple(worker.stats() for worker in self._places.all())

    # --- talking --------------------------------------------------------------------------------------------------

    def send_target(self, message: Message) -> None:
        self.send_drafter(TARGET, message)

    def send_drafter(self, name: str, message: Message) -> None:
        """To a worker by name, at the next `flush`; one that has gone meanwhile hears nothing."""
        self._going.setdefault(name, []).append(message)

    def flush(self) -> None:
        """What each worker is to hear leaves, together."""
        for name, messages in self._going.items():
            worker = self._places.named(name)
            if worker is not None:
                self._send(routing_id(worker.incarnation), *messages)
        self._going.clear()

    def let_go(self) -> None:
        """Flushes and gives the core away: on a machine of two, whoever waits for what was sent waits for this one."""
        self.flush()
        os.sched_yield()

    def receive(self) -> Iterator[tuple[str, Message]]:
        """What waits about requests, each with the name of the worker whose place it came from; never blocks."""
        while True:
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in self._decoded(frames):
                worker = self._places.at(identity)
                match message:
                    case Hello():
                        self._hello(identity, message)
                    case _ if worker is None:
                        self.rejected += 1
                        log.info("dropped a stranger's %s", type(message).__name__)
                    case CacheReport(use=use):
                        worker.cache, self.news = use, True
                    case Pong(serial=serial, progress=progress):
                        worker.pulse.answered(progress, serial == self._ping_serial)
                    case Loading(role=role, stage=stage):
                        self.stage, self.news = f"{role}: {stage}", True
                    case Fault(request=None, message=why, dispensable=dispensable):
                        worker.fault = why  # it will end, and `losses` will tell
                        if dispensable and worker.role == "draft":
                            worker.state, self.news = "refused", True
                    case _:
                        yield worker.name, message

    def ping(self, now_ns: int) -> None:
        if now_ns < self._next_ping_ns:
            return
        self._next_ping_ns = now_ns + int(self.seconds_a_ping * SECOND_NS)
        self._ping_serial += 1
        for worker in self._places.all():
            if worker.entered:
                worker.pulse.unanswered += 1
                self._send(heartbeat_of(routing_id(worker.incarnation)), Ping(self._ping_serial))

    def losses(self) -> list[Loss]:
        """Workers newly found gone, which are ended, and drafters newly found frozen, which are left alone."""
        lost = []
        for worker in self._places.all():
            started, why = worker.entered, worker.why_gone(self.seconds_a_ping)
            if worker.state in ("lost", "refused"):
                continue
            if why is not None:
                self._give_up(worker, why)
                lost.append(Loss(worker, why, started))
            elif started and worker.pulse.faint != (worker.state == "frozen"):
                self._freeze_or_thaw(worker)
                if worker.role == "draft" and worker.state == "frozen":
                    lost.append(Loss(worker, f"{worker} does not answer; requests go on without it", started))
        return lost

    def close(self) -> None:
        """Ends the workers in order, then the socket."""
        self.flush()
        spawned = [worker.spawned for worker in self._places.all() if worker.spawned]
        for worker in self._places.all():
            self._send(routing_id(worker.incarnation), Shutdown())
        for process in spawned:
            process.terminate()
        for process in spawned:
            process.wait(STOP_GRACE_SECONDS)
        self.door.close()

    def _hello(self, identity: bytes, hello: Hello) -> None:
        """A worker is ready: one that was spawned, or a drafter that joins. A HELLO said again changes nothing."""
        worker = self._places.at(identity)
        why = self._places.refusal(identity, hello) if worker is None else None
        if why is not None or (worker is not None and worker.state != "starting"):
            self.rejected += 1
            log.warning("turned %s away: %s", hello.name or f"a {hello.role}", why or "it is here already")
            if why is not None:
                self._send(identity, Shutdown(why))
            return
        worker = worker or self._places.join(hello)
        worker.hello, worker.state, worker.pulse = hello, "ready", Pulse()
        self._send(identity, Welcome(worker.name))
        self._share_memory()
        self.news = True

    def _share_memory(self) -> None:
        """Tells all workers what their texts may take, by who is there."""
        room = self.kv_room
        for worker in self._places.all():
            share = room.share(worker.hello.kv, self.target_context) if worker.hello is not None else 0
            if worker.entered and share != worker.kv_limit:
                worker.kv_limit = share
                self._send(routing_id(worker.incarnation), KvMemory(share, self._settings.prompt_cache))

    def _give_up(self, worker: Worker, why: str) -> None:
        worker.state, worker.fault, self.news = "lost", why, True
        self._send(routing_id(worker.incarnation), Shutdown(why))
        self._places.take_away(worker)
        if worker.spawned:
            worker.spawned.kill()
        self._share_memory()

    def _freeze_or_thaw(self, worker: Worker) -> None:
        worker.state = "frozen" if worker.pulse.faint else "ready"
        log.warning("%s %s", worker, "does not answer" if worker.state == "frozen" else "answers again")
        self.news = True

    def _spawn(self, role: str, name: str) -> None:
        incarnation = secrets.randbits(INCARNATION_BITS)
        spawned = spawn_worker(role, name, self.endpoint, self._settings, self._run_dir, incarnation)
        self._places.give(Worker(name, role, incarnation, spawned))

    def _decoded(self, frames: Sequence[bytes]) -> list[Message]:
        try:
            return decode_all(frames)
        except ProtocolError as error:
            self.rejected += 1
            log.warning("dropped a frame on the workers' socket: %s", error)
            return []

    def _send(self, identity: bytes, *messages: Message) -> None:
        frames = encode_all(messages)
        self.socket.send(identity, zmq.SNDMORE)
        for frame in frames[:-1]:
            self.socket.send(frame, zmq.SNDMORE)
        self.socket.send(frames[-1])
