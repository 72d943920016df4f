"""Fuzzes a whole cluster: both sockets of a real server with real workers.

Unknown peers, malicious clients and a drafter that has joined send broken frames; the server does not read more than
its rate limits allow. An honest client sends requests meanwhile, and must receive the same texts as before.
"""

from __future__ import annotations

import random
from typing import Any

import zmq

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.codec import MESSAGES
from outrider.protocol.messages import Cancel, Generate, Shutdown, StatsQuery
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import INCARNATION_BITS
from tests.harness.fuzz.fuzz_target import FuzzFailure
from tests.harness.fuzz.honest_workers import Peer, drafter
from tests.harness.fuzz.mutation import Mutator

PROMPT = "def fibonacci(n):"
SAMPLING = SamplingParams(max_tokens=24, temp=0.8, seed=5)
RESTS_A_QUESTION = 10
PATIENCE_S = 60.0


class ProcessesFuzz:
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._cluster = LocalCluster()
        self._client = self._cluster.client(PATIENCE_S)
        self._expected = self._ask()
        self._context: zmq.Context[Any] = zmq.Context()
        self._asked = Mutator(rng, ["Generate", "Cancel", "StatsQuery", *MESSAGES])
        for message in (Generate("q", "def ", None, SamplingParams(max_tokens=4)), Cancel("q"), StatsQuery("q")):
            self._asked.show(message)
        self._worked = Mutator(rng, list(MESSAGES))
        self._batches = self._texts = self._malicious_count = self._unsent = 0
        self._lied = self._sender()
        self._malicious = self._new_malicious()

    @property
    def pid(self) -> int:
        """The pid of the process that may not grow."""
        return self._cluster.pid

    def send_broken(self) -> None:
        try:
            if self._rng.random() < 0.5:
                self._lied.send_multipart(self._asked.frames() or [b""], zmq.NOBLOCK)
            else:
                self._malicious.send_frames(self._worked.frames(), self._rng.random() < 0.1)
        except zmq.Again:  # the server does not read this fast
            self._unsent += 1

    def settle(self) -> None:
        self._batches += 1
        while self._lied.poll(0):
            self._lied.recv_multipart()
        for message in self._malicious.received():
            if isinstance(message, Shutdown):
                self._malicious.close()
                self._malicious = self._new_malicious()
                break
            self._worked.show(message, *drafter(message))
        if self._batches % RESTS_A_QUESTION == 0:
            self._lied.close(linger=0)
            self._lied = self._sender()
            if self._ask() != self._expected:
                raise FuzzFailure("an honest client received another text")
            self._texts += 1

    def summary(self) -> str:
        stats = self._client.stats()
        return (
            f"{self._texts} honest texts, all correct; {self._malicious_count} malicious drafters,"
            f" {stats.rejected_frames} frames refused, {self._unsent} not sent because a queue was full"
        )

    def close(self) -> None:
        self._lied.close(linger=0)
        self._malicious.close()
        self._context.destroy(linger=0)
        self._cluster.close()

    def _ask(self) -> tuple[int, ...]:
        return tuple(self._client.generate(PROMPT, SAMPLING, chat_template=False).token_ids)

    def _sender(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.connect(self._cluster.endpoint)
        return socket

    def _new_malicious(self) -> Peer:
        self._malicious_count += 1
        endpoint, number = self._cluster.workers_endpoint, self._rng.getrandbits(INCARNATION_BITS)
        peer = Peer(self._context, endpoint, "draft", number)
        peer.hot.setsockopt(zmq.SNDTIMEO, 0)
        peer.beat.setsockopt(zmq.SNDTIMEO, 0)
        peer.hello()
        return peer
