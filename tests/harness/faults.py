"""Random faults of a cluster, one at a time: workers die or stop, unknown peers send frames, clients vanish or do not
read.

A fault ends when its method returns; the cluster's recovery may take longer.
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
from tests.harness.fuzz.honest_workers import Peer, drafter
from tests.harness.fuzz.mutation import Mutator

FRAMES, CLIENTS, BYTES = 400, 20, 4000
BRIEF_S, UNREAD_S = 0.3, 2.0
STARTED = ("target-0", "draft-0")
ROLES = (("draft",), ("target",), ("draft", "target"))


class Faults:
    """Causes faults of one cluster; `happened` counts them by name."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.happened: Counter[str] = Counter()
        self._cluster, self._rng = cluster, rng
        self._client = cluster.client()
        self._asked = Mutator(rng, ["Generate", "Generate", "Cancel", "StatsQuery", *MESSAGES])
        self._asked.show(Generate("q", "def ", None, SamplingParams(max_tokens=4)))
        self._asked.show(Cancel("q"))
        self._asked.show(StatsQuery("q"))
        self._worked = Mutator(rng, list(MESSAGES))

    def one(self) -> str:
        """Causes a random fault, and returns its name."""
        kinds: list[Callable[[], None]] = [
            *(self._kills, self._stops, self._stops_briefly, self._clients_garbage, self._workers_garbage),
            *(self._a_malicious_drafter_joins, self._bytes, self._clients_vanish, self._a_client_does_not_read),
        ]
        fault = self._rng.choice(kinds)
        fault()
        name = fault.__name__.strip("_").replace("_", " ")
        self.happened[name] += 1
        return name

    def _kills(self) -> None:
        self._signal(signal.SIGKILL)

    def _stops(self) -> None:
        self._signal(signal.SIGSTOP)

    def _stops_briefly(self) -> None:
        stopped = self._signal(signal.SIGSTOP)
        time.sleep(BRIEF_S)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> list[int]:
        roles = self._rng.choice(ROLES)
        workers = self._client.stats().workers
        # Only running workers of this cluster: another process may have the id of a dead one.
        own = [worker for worker in workers if worker.name in STARTED and worker.state == "ready"]
        pids = [worker.pid for worker in own if worker.role in roles]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def _clients_garbage(self) -> None:
        with self._dealer(self._cluster.endpoint) as dealer:
            for _ in range(FRAMES):
                dealer.send_multipart(self._asked.frames() or [b""])
                while dealer.poll(0):
                    dealer.recv_multipart()

    def _workers_garbage(self) -> None:
        with self._dealer(self._cluster.workers_endpoint) as dealer:
            for _ in range(FRAMES):
                dealer.send_multipart(self._worked.frames() or [b""])

    def _a_malicious_drafter_joins(self) -> None:
        """A drafter joins and sends invalid messages until it is dismissed or has sent all."""
        context: zmq.Context[Any] = zmq.Context()
        peer = Peer(context, self._cluster.workers_endpoint, "draft", self._rng.getrandbits(INCARNATION_BITS))
        peer.hello()
        for _ in range(FRAMES):
            for message in peer.received():
                if isinstance(message, Shutdown):
                    break
                self._worked.show(message, *drafter(message))
            peer.send_frames(self._worked.frames(), self._rng.random() < 0.1)
            time.sleep(BRIEF_S / FRAMES)
        peer.close()
        context.destroy(linger=0)

    def _bytes(self) -> None:
        """Sends raw bytes to the clients' socket, below ZeroMQ."""
        where = parse_endpoint(self._cluster.endpoint)
        if isinstance(where, Ipc):
            with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
                line.connect(where.path)
                line.sendall(self._rng.randbytes(self._rng.randrange(BYTES)))

    def _clients_vanish(self) -> None:
        for number in range(CLIENTS):
            with self._dealer(self._cluster.endpoint) as dealer:
                words = Generate(f"gone {number}", "def ", None, SamplingParams(max_tokens=50))
                dealer.send_multipart(encode(words))
                dealer.poll(self._rng.choice((0, 30)))

    def _a_client_does_not_read(self) -> None:
        with self._dealer(self._cluster.endpoint) as dealer:
            for number in range(CLIENTS):
                words = Generate(f"unread {number}", "def ", None, SamplingParams(max_tokens=50))
                dealer.send_multipart(encode(words))
            time.sleep(UNREAD_S)

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
