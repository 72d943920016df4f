"""Fuzzes the clients' endpoint of an orchestrator: the real front with its socket and the tiny pair's tokenizer.

A fake core completes each text at once. Malicious clients send invalid frames, while a correct client repeats requests
and checks every text.
"""

from __future__ import annotations

import random
import select
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import zmq

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.events import (
    Admit,
    Committed,
    Mailbox,
    Quit,
    RequestBegan,
    RequestEnded,
    Stop,
    ThreadQueues,
    ToCore,
    ToFront,
    WorkersChanged,
)
from outrider.orchestrator.front.admission import Admission
from outrider.orchestrator.front.loop import Front
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.sockets import ClientSocket
from outrider.protocol.codec import MESSAGES
from outrider.protocol.messages import Cancel, Generate, Stats, StatsQuery, Timings, WorkerStats
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.socket_files import PrivateDirectory
from tests.harness.fuzz.fuzz_target import UNLIMITED_RATE, FuzzFailure
from tests.harness.fuzz.mutation import Mutator

VOCABULARY, MAX_TOKENS, SENDER_COUNT = 4096, 40, 4
TIMEOUT_S = 30.0


def expected_tokens(seed: int, count: int) -> tuple[int, ...]:
    """Returns the tokens of a request with this seed."""
    return tuple(1 + zlib.crc32(f"{seed} {place}".encode()) % (VOCABULARY - 1) for place in range(count))


class InstantCore:
    """A fake core that completes each text at once: `run` is its thread's function."""

    def stats(self, stats: Stats) -> Stats:
        return stats

    def __init__(self, inbox: Mailbox[ToCore], outbox: Mailbox[ToFront]) -> None:
        self._inbox, self._outbox = inbox, outbox
        target = WorkerStats("target", "target-0", 1, "", "", VOCABULARY, 8192, 1, 1, state="ready")
        outbox.put(WorkersChanged((target,)))

    def run(self) -> None:
        while True:
            select.select([self._inbox.wake], [], [])
            for event in self._inbox.take():
                match event:
                    case Admit():
                        self._complete(event)
                    case Stop(request=request, reason=reason):
                        self._outbox.put(RequestEnded(request, reason, Timings()))
                    case Quit():
                        return

    def _complete(self, admit: Admit) -> None:
        count = min(admit.sampling.max_tokens, MAX_TOKENS)
        self._outbox.put(RequestBegan(admit.request, "ssd"))
        self._outbox.put(Committed(admit.request, expected_tokens(admit.sampling.seed or 0, count)))
        self._outbox.put(RequestEnded(admit.request, "length", Timings(predicted_n=count)))


class ClientsSocketFuzz:
    """See the module. `endpoint`: the clients' endpoint (None: a path in a new directory)."""

    def __init__(self, rng: random.Random, endpoint: str | None = None) -> None:
        self._rng = rng
        self._mutator = Mutator(rng, [*MESSAGES, *(["Generate"] * 20), *(["Cancel", "StatsQuery"] * 3)])
        self._stack = ExitStack()
        directory = self._stack.enter_context(PrivateDirectory())
        self._context: zmq.Context[Any] = zmq.Context()
        with patch("outrider.orchestrator.sockets.CLIENT_RATE", UNLIMITED_RATE):
            self.clients = ClientSocket(self._context, endpoint or directory.endpoint("clients"))
        self._queues = ThreadQueues()
        core = InstantCore(self._queues.core, self._queues.events)
        pair = choose_pair(ServeSettings())
        front = Front(pair, Admission(pair, load_pair(pair)), self.clients, self._queues, core.stats, lambda _: None)
        self._threads = [threading.Thread(target=body, daemon=True) for body in (front.run, core.run)]
        for thread in self._threads:
            thread.start()
        self._front = front
        self._client_context: zmq.Context[Any] = zmq.Context()
        self._senders = [self._new_sender() for _ in range(SENDER_COUNT)]
        self._executor = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.checked_count = 0
        for sampling in (SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=9, temp=0.8, stop=("a",))):
            self._mutator.show(Generate("q1", "a prompt", None, sampling))
        self._mutator.show(Cancel("q1"))
        self._mutator.show(StatsQuery("q2", "q1"))

    def send_broken(self) -> None:
        index = self._rng.randrange(SENDER_COUNT)
        if self._rng.random() < 0.01:
            self._senders[index].close(linger=100)
            self._senders[index] = self._new_sender()
        try:
            self._senders[index].send_multipart(self._mutator.frames() or [b""], zmq.NOBLOCK)
        except zmq.Again:
            self._discard_answers()
            self._senders[index].send_multipart([b""])

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.result(TIMEOUT_S)
        self._pending = self._executor.submit(self.check_request)
        self._discard_answers()
        if not all(thread.is_alive() for thread in self._threads):
            raise FuzzFailure("a thread of the orchestrator has ended")

    def check_request(self) -> None:
        """Sends a valid request, and checks its answer."""
        seed = self.checked_count
        result = Client(self.clients.endpoint, TIMEOUT_S).generate([1, 2, 3], SamplingParams(max_tokens=20, seed=seed))
        if result.token_ids != expected_tokens(seed, 20):
            raise FuzzFailure(f"seed {seed} received {result.token_ids}")
        self.checked_count += 1

    def summary(self) -> str:
        stats = self._front.stats("")
        return (
            f"{self.checked_count} texts of the correct client, none wrong; {stats.finished} requests ended and"
            f" {stats.failed} were refused in all, {stats.rejected_frames} frames were refused"
        )

    def close(self) -> None:
        self._executor.shutdown()
        for sender in self._senders:
            sender.close(linger=0)
        self._queues.events.put(Quit())
        self._threads[0].join(TIMEOUT_S)
        self._queues.core.put(Quit())
        self._threads[1].join(TIMEOUT_S)
        self._queues.close()
        self._client_context.destroy(linger=0)
        self._context.destroy(linger=0)
        self._stack.close()

    def _new_sender(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._client_context.socket(zmq.DEALER)
        if self._rng.random() < 0.5:
            socket.setsockopt(zmq.IDENTITY, b"c" + self._rng.randbytes(self._rng.randrange(1, 40)))
        socket.connect(self.clients.endpoint)
        return socket

    def _discard_answers(self) -> None:
        for sender in self._senders:
            while sender.poll(0):
                sender.recv_multipart()
