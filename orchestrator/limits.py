"""Limits: how much a peer may send, how many connections an endpoint serves, and how much memory texts may take.

`RateLimiter`: each peer of a socket may send so much a second, with a reserve for bursts. What exceeds that is dropped
before it is read, so a flood takes no time from other peers. Knows peers and sizes; knows nothing of messages.

`ConnectionLimiter`: serves an endpoint for so many connections at once; ZeroMQ would accept until no file is left and
then end the process. A full unix socket stops listening, and whoever connects waits in the system's queue. A port can't
stop listening, so excess connections to one are closed, and may try again.

`KVBudget`: how much memory texts may take in all workers together, and what one request needs of it. A text lies in the
target and in every drafter, so the budget counts tokens alike for all: each worker's share is what the same tokens take
there. Arithmetic only; the front waits for room, the workers evict.
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
"""A message counts as one more for each of these."""
MOST_PEERS = 64
"""So many are not looked through for those that could be forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many messages a second, after as many at once as are in `reserve`."""

    a_second: float
    reserve: float


@dataclass(slots=True)
class _Level:
    left: float
    at_ns: int
    is_over: bool = False


class RateLimiter:
    """Of all peers of one socket alike."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._levels: dict[bytes, _Level] = {}
        self._most = MOST_PEERS

    def allow(self, peer: bytes, frames: Iterable[bytes | memoryview], now_ns: int) -> bool:
        """Whether the peer may send this much now."""
        level = self._level(peer, now_ns)
        cost = 1 + sum(map(len, frames)) / BYTES
        # What is larger than the reserve passes when that is full: a size has a limit of its own.
        if level.left < min(cost, self._rate.reserve):
            return False
        level.left -= cost
        return True

    def is_first(self, peer: bytes) -> bool:
        """Whether this refusal is the peer's first since it had all its reserve: the one to report."""
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
        """Forgets peers that have all their reserve. Looks through all only when they have doubled."""
        if len(self._levels) < self._most:
            return
        for peer, level in list(self._levels.items()):
            self._fill(level, now_ns)
            if level.left == self._rate.reserve:
                del self._levels[peer]
        self._most = max(2 * len(self._levels), MOST_PEERS)


CROWDED = 0.875


class LimitedEndpoint:
    """An endpoint and its connections: file descriptors, as ZeroMQ reports them."""

    def __init__(self, bound: Bound, most: int) -> None:
        self.bound = bound
        self.inside: set[int] = set()
        self.most = most

    @property
    def crowded(self) -> bool:
        return len(self.inside) >= CROWDED * self.most

    def enter(self, descriptor: int) -> None:
        """A connection was accepted. At a port, which can't stop listening, one too many is closed."""
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
    """Binds `socket` to `endpoint`. Whenever something waits on `monitor`, call `watch`.

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
        """Serves one more endpoint, with a limit of its own, so that a crowd at one leaves room at another.

        Endpoints without keys come first; see `bind`.
        """
        bound = bind(self._socket, endpoint, keys)
        self.endpoints.append(LimitedEndpoint(bound, most))
        return bound

    @property
    def crowded(self) -> bool:
        """Nearly all places are taken: time to turn work away while there is still room to say so."""
        return any(one.crowded for one in self.endpoints)

    def watch(self) -> None:
        """Counts the connections that came and went; stops or resumes listening."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._at(event["endpoint"].decode()).enter(event["value"])
            else:
                for one in self.endpoints:
                    one.inside.discard(event["value"])
        for one in self.endpoints:
            one.keep()

    def close(self, linger_ms: int = 0) -> None:
        """Ends the socket and frees the endpoints."""
        self._end_monitor()
        for one in self.endpoints:
            one.bound.close(linger_ms)

    def _at(self, endpoint: str) -> LimitedEndpoint:
        """The endpoint there; ZeroMQ may spell an address in its own way, of which there is at most one."""
        return next((one for one in self.endpoints if one.bound.endpoint == endpoint), self.endpoints[-1])

    def _end_monitor(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)


_PART = 2  # of what weights leave of the machine's memory: one half is the texts', one everything else's
_ENDLESS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`limit` bytes for texts that take `cost` in all workers together."""

    limit: int
    cost: KvCost

    @property
    def tokens(self) -> int:
        """The longest text that fits."""
        if not self.cost.per_token:
            return _ENDLESS
        return max(self.limit - self.cost.per_text, 0) // self.cost.per_token

    def places(self, tokens: int) -> int:
        """How many texts of so many tokens fit beside each other, at least one."""
        return max(self.limit // max(self.cost.of(tokens), 1), 1)

    def share(self, cost: KvCost, tokens: int) -> int:
        """The bytes of a worker where texts take `cost`; they are split as they are for a text of so many tokens."""
        return self.limit * cost.of(tokens) // max(self.cost.of(tokens), 1)


def kv_budget(limit: int | None, workers: Iterable[WorkerStats], memory: int) -> KVBudget:
    """The room of these workers, those that are there or will be again.

    Args:
        limit: bytes; None: half of what their weights leave of `memory`.
        memory: the machine's, in bytes.
    """
    there = [worker for worker in workers if worker.state in ("ready", "frozen", "restarting")]
    left = max(memory - sum(worker.weight_bytes for worker in there), 0)
    return KVBudget(left // _PART if limit is None else limit, sum((worker.kv for worker in there), KvCost()))


def check_holds(budget: KVBudget, context: int, name: str) -> None:
    """
    Raises:
        InvalidRequest: not even one text as long as the context of model `name` fits.
    """
    needed = budget.cost.of(context)
    if needed > budget.limit:
        raise InvalidRequest(
            f"kv_memory is {in_mb(budget.limit)}, and one text of {context} tokens, the context of {name}, takes"
            f" {in_mb(needed)} in all workers; expected at least that, or no kv_memory for what the machine has"
        )


def in_mb(count: int) -> str:
    """Bytes for a person to read."""
    return f"{count / 1e6:.1f} MB"
