"""Fuzzes the workers' endpoint of an orchestrator: the real worker pool and scheduler in this thread, on a real socket.

A malicious drafter that has joined, and an unknown peer, send invalid frames during requests with correct fake workers.
When the malicious drafter is disconnected, another one joins.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import zmq

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import now
from outrider.protocol.codec import MESSAGES
from outrider.protocol.messages import Failed, Shutdown, is_serving
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.worker_link import INCARNATION_BITS
from tests.harness.fuzz.fake_workers import Peer, drafter_answers, target_answers, token_at
from tests.harness.fuzz.fuzz_target import UNLIMITED_RATE, FuzzFailure
from tests.harness.fuzz.mutation import Mutator
from tests.harness.settings import round_settings

POOL = "outrider.orchestrator.core.worker_pool"
SPAWNER = "outrider.orchestrator.core.worker_pool.spawn_worker"
AT_ONCE, MAX_TOKENS, EXCHANGES_PER_BATCH = 3, 60, 3
MAX_IDLE_BATCHES = 1000  # batches within which some request must progress
WAIT_MS = 5
MODES = ("ssd", "ssd", "sd", "auto")


class Process:
    """A fake worker process."""

    pid = 1

    def poll(self) -> int | None:
        return None

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def wait(self, grace: float) -> int:
        return 0


class WorkersSocketFuzz:
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._mutator = rng, Mutator(rng, list(MESSAGES))
        self._stack = ExitStack()
        directory = self._stack.enter_context(PrivateDirectory())
        self._context: zmq.Context[Any] = zmq.Context()
        with patch(f"{POOL}.DRAFTER_RATE", UNLIMITED_RATE), patch(f"{POOL}.STRANGER_RATE", UNLIMITED_RATE):
            self._pool = WorkerPool(self._context, ServeSettings(), directory.path)
        incarnations: dict[str, int] = {}

        def spawn(role: str, name: str, endpoint: str, settings: object, folder: object, incarnation: int) -> Process:
            incarnations[name] = incarnation
            return Process()

        with patch(SPAWNER, spawn):
            self._pool.start()
        self._rounds = Scheduler(self._pool, round_settings(4, 8), self._on_event, Trace(None))
        self._fake_workers = [self._peer(name.partition("-")[0], number) for name, number in incarnations.items()]
        for peer, name in zip(self._fake_workers, incarnations, strict=True):
            peer.hello(name)
        self._malicious_count = 0
        self._malicious, self._unknown = self._new_malicious(), self._new_drafter()
        self._request_count = self._finished_count = self._token_count = self._idle_batches = 0
        self._committed: dict[str, int] = {}
        for _ in range(200):
            self._exchange(WAIT_MS)
        if not is_serving(self._pool.stats()):
            raise FuzzFailure("the fake workers were not accepted")

    def send_broken(self) -> None:
        frames = self._mutator.frames()
        if self._rng.random() < 0.25:
            if self._rng.random() < 0.02:
                self._unknown.close()
                self._unknown = self._new_drafter()
            self._unknown.send_frames(frames, False)
        else:
            self._malicious.send_frames(frames, self._rng.random() < 0.1)

    def settle(self) -> None:
        before = self._token_count
        for _ in range(EXCHANGES_PER_BATCH):
            self._exchange(WAIT_MS)
        while self._pool.socket.poll(1):
            self._exchange(0)
        while self._rounds.active < AT_ONCE:
            self._request_count += 1
            name = f"r{self._request_count}"
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temp=0.8, seed=1)
            self._committed[name] = 3
            self._rounds.begin(Admit(name, (1, 2, 3), sampling, MODES[self._request_count % 4], frozenset()), now())
        self._idle_batches = self._idle_batches + 1 if self._token_count == before else 0
        if self._idle_batches > MAX_IDLE_BATCHES:
            raise FuzzFailure(f"no request has progressed for {MAX_IDLE_BATCHES} batches")

    def summary(self) -> str:
        return (
            f"{self._finished_count} requests with {self._token_count} tokens, all correct;"
            f" {self._malicious_count} malicious drafters, {self._pool.rejected} frames and messages refused,"
            f" {self._rounds.stale} stale messages dropped"
        )

    def close(self) -> None:
        for peer in [*self._fake_workers, self._malicious, self._unknown]:
            peer.close()
        self._pool.close()
        self._context.destroy(linger=0)
        self._stack.close()

    def _exchange(self, wait_ms: int) -> None:
        """Handles the messages that have arrived, and lets the workers answer the scheduler's messages."""
        if self._pool.socket.poll(wait_ms):
            arrived = list(self._pool.receive())
            arrived.sort(key=lambda arrival: type(arrival[1]).__name__ == "Outcome")
            self._rounds.handle(arrived, now())
        self._pool.router.update_connections()
        for worker in self._pool.arrivals():
            if worker.role == "target":
                self._rounds.on_target_ready()
            else:
                self._rounds.on_drafter_ready(worker.name)
        for loss in self._pool.losses(now()):
            if loss.worker.role == "target":
                raise FuzzFailure(f"the target was lost: {loss.why}")
            self._rounds.on_drafter_lost(loss.worker.name, loss.why, now())
        self._rounds.on_tick(now())
        self._pool.flush()
        for peer in self._fake_workers:
            answer = target_answers if peer.role == "target" else drafter_answers
            for message in peer.received():
                if isinstance(message, Shutdown):
                    raise FuzzFailure(f"a correct {peer.role} was disconnected: {message.reason}")
                if answers := answer(message):
                    peer.send(*answers)
        self._receive_as_malicious()

    def _receive_as_malicious(self) -> None:
        """Gives the mutator the messages to the malicious drafter, and the correct answers to them."""
        for message in self._malicious.received():
            if isinstance(message, Shutdown):
                self._malicious.close()
                self._malicious = self._new_malicious()
                return
            self._mutator.show(message)
            for answer in drafter_answers(message):
                self._mutator.show(answer)

    def _on_event(self, event: ToFront) -> None:
        match event:
            case Committed(request=request, tokens=tokens):
                for one in tokens:
                    if one != token_at(request, self._committed[request]):
                        raise FuzzFailure(f"{request} has {one} at {self._committed[request]}")
                    self._committed[request] += 1
                self._token_count += len(tokens)
            case RequestEnded(request=request):
                if self._committed.pop(request) != 3 + MAX_TOKENS:
                    raise FuzzFailure(f"{request} ended too soon")
                self._finished_count += 1
            case Failed():
                raise FuzzFailure(f"a request failed: {event}")

    def _peer(self, role: str, incarnation: int) -> Peer:
        return Peer(self._context, self._pool.endpoint, role, incarnation)

    def _new_malicious(self) -> Peer:
        self._malicious_count += 1
        peer = self._new_drafter()
        peer.hello()
        return peer

    def _new_drafter(self) -> Peer:
        return self._peer("draft", self._rng.getrandbits(INCARNATION_BITS))
