"""Limits on the messages of a peer, the connections of an endpoint, and the memory of texts.

`RateLimiter` limits the messages of each peer of a socket per second, with a reserve for bursts. Messages over it are
dropped before they are decoded, so a flood takes no time from other peers. Knows peers and sizes; knows nothing of
messages.

`ConnectionLimiter` limits the connections of an endpoint; ZeroMQ would accept connections until no file descriptor is
left, and then end the process. A full unix socket stops listening, and new connections wait in the system's queue. A
port can't stop listening, so excess connections to it are closed, and may try again.

`KVBudget` is the memory for texts in all workers together. A text is in the target and in every drafter, so the budget
counts tokens alike for all: each worker's share is what the same tokens take there. Arithmetic only; the front waits
for room, the workers evict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.clock import SECOND_NS
from outrider.protocol.endpoints import Bound, bind
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.keys import ServerKeys
from outrider.protocol.messages import WorkerStats
from outrider.protocol.stats import KvCost

BYTES = 16 * 1024
"""A message counts as one more for each of these bytes."""
MOST_PEERS = 64
"""With fewer peers idle ones are not dropped."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of messages per second, with a `reserve` of messages for bursts."""

    a_second: float
    reserve: float


@dataclass(slots=True)
class _Level:
    left: float
    at_ns: int
    is_over: bool = False


class RateLimiter:
    """Applies one rate to each peer of a socket."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._levels: dict[bytes, _Level] = {}
        self._most = MOST_PEERS

    def allow(self, peer: bytes, frames: Iterable[bytes | memoryview], now_ns: int) -> bool:
        """Whether the peer may send this much now."""
        level = self._level(peer, now_ns)
        cost = 1 + sum(map(len, frames)) / BYTES
        # A message larger than the reserve passes if the reserve is full: sizes have a limit of their own.
        if level.left < min(cost, self._rate.reserve):
            return False
        level.left -= cost
        return True

    def is_first(self, peer: bytes) -> bool:
        """Whether this refusal, the one to report, is the peer's first since its reserve was full."""
        level = self._levels[peer]
        level.is_over, was_over = True, level.is_over
        return not was_over

    def _level(self, peer: bytes, now_ns: int) -> _Level:
        level = self._levels.get(peer)
        if level is None:
            self._forget_idle(now_ns)
            level = self._levels[peer] = _Level(self._rate.reserve, now_ns)
        self._fill(level, now_ns)
        return level

    def _fill(self, level: _Level, now_ns: int) -> None:
        level.left = min(level.left + (now_ns - level.at_ns) / SECOND_NS * self._rate.a_second, self._rate.reserve)
        level.at_ns = now_ns
        if level.left == self._rate.reserve:
            level.is_over = False

    def _forget_idle(self, now_ns: int) -> None:
        """Drops peers whose reserve is full. Checks them only when their number has doubled."""
        if len(self._levels) < self._most:
            return
        for peer, level in list(self._levels.items()):
            self._fill(level, now_ns)
            if level.left == self._rate.reserve:
                del self._levels[peer]
        self._most = max(2 * len(self._levels), MOST_PEERS)


CROWDED = 0.875


class LimitedEndpoint:
    """An endpoint and its connections, as file descriptors that ZeroMQ reports."""

    def __init__(self, bound: Bound, most: int) -> None:
        self.bound = bound
        self.inside: set[int] = set()
        self.most = most

    @property
    def crowded(self) -> bool:
        return len(self.inside) >= CROWDED * self.most

    def enter(self, descriptor: int) -> None:
        """Adds an accepted connection; an excess one to a port, which can't stop listening, is closed."""
        self.inside.add(descriptor)
        if len(self.inside) > self.most:
            self.bound.hang_up(descriptor)

    def keep(self) -> None:
        """Stops or resumes listening."""
        if len(self.inside) >= self.most:
            self.bound.stop_listening()
        else:
            self.bound.listen()


class ConnectionLimiter:
    """Binds `socket` to `endpoint`. Call `watch` whenever `monitor` is readable.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, most: int, keys: ServerKeys | None = None) -> None:
        self._socket = socket
        self.endpoints: list[LimitedEndpoint] = []
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.bound = self.open(endpoint, most, keys)
        except BaseException:
            self._end_monitor()
            raise

    def open(self, endpoint: str, most: int, keys: ServerKeys | None = None) -> Bound:
        """Serves one more endpoint with a limit of its own, so that a full one leaves room at another.

        Endpoints without keys come first; see `bind`.
        """
        bound = bind(self._socket, endpoint, keys)
        self.endpoints.append(LimitedEndpoint(bound, most))
        return bound

    @property
    def crowded(self) -> bool:
        """Whether an endpoint is nearly full: new work must be refused while there is still room to answer."""
        return any(endpoint.crowded for endpoint in self.endpoints)

    def watch(self) -> None:
        """Counts connections that were opened and closed; stops or resumes listening."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._at(event["endpoint"].decode()).enter(event["value"])
            else:
                for endpoint in self.endpoints:
                    endpoint.inside.discard(event["value"])
        for endpoint in self.endpoints:
            endpoint.keep()

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket and frees the endpoints."""
        self._end_monitor()
        for endpoint in self.endpoints:
            endpoint.bound.close(linger_ms)

    def _at(self, address: str) -> LimitedEndpoint:
        """Returns the endpoint at an address; ZeroMQ may spell that of one, the last, differently."""
        return next((end for end in self.endpoints if end.bound.endpoint == address), self.endpoints[-1])

    def _end_monitor(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)


_PART = 2  # texts get one half of the memory that the weights leave, everything else the other
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`limit` bytes for texts that take `cost` in all workers together."""

    limit: int
    cost: KvCost

    @property
    def tokens(self) -> int:
        """The longest text that fits."""
        if not self.cost.per_token:
            return _UNLIMITED
        return max(self.limit - self.cost.per_text, 0) // self.cost.per_token

    def places(self, tokens: int) -> int:
        """Returns how many texts of this many tokens fit together, at least one."""
        return max(self.limit // max(self.cost.of(tokens), 1), 1)

    def share(self, cost: KvCost, tokens: int) -> int:
        """Returns a worker's part in bytes, given its own `cost`, in proportion to a text of this many tokens."""
        return self.limit * cost.of(tokens) // max(self.cost.of(tokens), 1)


def kv_budget(limit: int | None, workers: Iterable[WorkerStats], memory: int) -> KVBudget:
    """Returns the budget of the workers that are in use or restarting.

    Args:
        limit: bytes; None: half of the memory that their weights leave.
        memory: the machine's memory in bytes.
    """
    used = [worker for worker in workers if worker.state in ("ready", "frozen", "restarting")]
    left = max(memory - sum(worker.weight_bytes for worker in used), 0)
    return KVBudget(left // _PART if limit is None else limit, sum((worker.kv for worker in used), KvCost()))


def check_holds(budget: KVBudget, context: int, name: str) -> None:
    """Checks that one text as long as the context of model `name` fits.

    Raises:
        InvalidRequest: it does not.
    """
    needed = budget.cost.of(context)
    if needed > budget.limit:
        raise InvalidRequest(
            f"kv_memory is {in_mb(budget.limit)}, and one text of {context} tokens, the context of {name}, takes"
            f" {in_mb(needed)} in all workers; expected at least that, or no kv_memory, to use what the machine has"
        )


def in_mb(count: int) -> str:
    """Formats bytes as megabytes."""
    return f"{count / 1e6:.1f} MB"
