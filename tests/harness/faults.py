"""Injects random faults into a cluster, one at a time: workers are killed or suspended, unknown peers send invalid
frames, clients disconnect or do not read.

A fault is over when its method returns; the cluster's recovery may take longer.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.codec import MESSAGES, encode
from outrider.protocol.endpoints import Ipc, parse_endpoint
from outrider.protocol.messages import Cancel, Generate, Shutdown, StatsQuery
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import INCARNATION_BITS
from tests.harness.fuzz.fake_workers import Peer, drafter_answers
from tests.harness.fuzz.mutation import Mutator

FRAMES, CLIENTS, BYTES = 400, 20, 4000
SHORT_STOP_S, UNREAD_WAIT_S = 0.3, 2.0
STARTED_WORKERS = ("target-0", "draft-0")
ROLES = (("draft",), ("target",), ("draft", "target"))


class Faults:
    """Causes faults of one cluster. `counts`: the number of faults by name."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._rng = cluster, rng
        self._client = cluster.client()
        self._client_frames = Mutator(rng, ["Generate", "Generate", "Cancel", "StatsQuery", *MESSAGES])
        self._client_frames.show(Generate("q", "def ", None, SamplingParams(max_tokens=4)))
        self._client_frames.show(Cancel("q"))
        self._client_frames.show(StatsQuery("q"))
        self._worker_frames = Mutator(rng, list(MESSAGES))

    def inject_random(self) -> str:
        """Causes a random fault, and returns its name."""
        kinds: list[Callable[[], None]] = [
            *(self._kills, self._stops, self._stops_briefly, self._clients_garbage, self._workers_garbage),
            *(self._a_malicious_drafter_joins, self._bytes, self._clients_vanish, self._a_client_does_not_read),
        ]
        fault = self._rng.choice(kinds)
        fault()
        name = fault.__name__.strip("_").replace("_", " ")
        self.counts[name] += 1
        return name

    def _kills(self) -> None:
        self._signal(signal.SIGKILL)

    def _stops(self) -> None:
        self._signal(signal.SIGSTOP)

    def _stops_briefly(self) -> None:
        stopped = self._signal(signal.SIGSTOP)
        time.sleep(SHORT_STOP_S)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> list[int]:
        roles = self._rng.choice(ROLES)
        workers = self._client.stats().workers
        # Only running workers of this cluster, because a dead worker's process id may have been reused.
        own = [worker for worker in workers if worker.name in STARTED_WORKERS and worker.state == "ready"]
        pids = [worker.pid for worker in own if worker.role in roles]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        return pids

    def _clients_garbage(self) -> None:
        with self._dealer(self._cluster.endpoint) as dealer:
            for _ in range(FRAMES):
                dealer.send_multipart(self._client_frames.frames() or [b""])
                while dealer.poll(0):
                    dealer.recv_multipart()

    def _workers_garbage(self) -> None:
        with self._dealer(self._cluster.workers_endpoint) as dealer:
            for _ in range(FRAMES):
                dealer.send_multipart(self._worker_frames.frames() or [b""])

    def _a_malicious_drafter_joins(self) -> None:
        """A drafter joins and sends invalid messages until it is disconnected or has sent `FRAMES` of them."""
        context: zmq.Context[Any] = zmq.Context()
        peer = Peer(context, self._cluster.workers_endpoint, "draft", self._rng.getrandbits(INCARNATION_BITS))
        peer.hello()
        for _ in range(FRAMES):
            for message in peer.received():
                if isinstance(message, Shutdown):
                    break
                self._worker_frames.show(message, *drafter_answers(message))
            peer.send_frames(self._worker_frames.frames(), self._rng.random() < 0.1)
            time.sleep(SHORT_STOP_S / FRAMES)
        peer.close()
        context.destroy(linger=0)

    def _bytes(self) -> None:
        """Sends raw bytes to the clients' socket, below ZeroMQ."""
        endpoint = parse_endpoint(self._cluster.endpoint)
        if isinstance(endpoint, Ipc):
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.connect(endpoint.path)
                connection.sendall(self._rng.randbytes(self._rng.randrange(BYTES)))

    def _clients_vanish(self) -> None:
        for number in range(CLIENTS):
            with self._dealer(self._cluster.endpoint) as dealer:
                request = Generate(f"gone {number}", "def ", None, SamplingParams(max_tokens=50))
                dealer.send_multipart(encode(request))
                dealer.poll(self._rng.choice((0, 30)))

    def _a_client_does_not_read(self) -> None:
        with self._dealer(self._cluster.endpoint) as dealer:
            for number in range(CLIENTS):
                request = Generate(f"unread {number}", "def ", None, SamplingParams(max_tokens=50))
                dealer.send_multipart(encode(request))
            time.sleep(UNREAD_WAIT_S)

    @contextmanager
    def _dealer(self, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
        context: zmq.Context[Any] = zmq.Context()
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        try:
            yield dealer
        finally:
            dealer.close(linger=100)
            context.term()
