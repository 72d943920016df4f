"""The orchestrator's ROUTER sockets, with limits on the messages of a peer and the connections of an endpoint.

`RateLimiter` limits the messages of each peer of a socket per second, with a reserve for bursts. Messages over it are
dropped before they are decoded, so a flood takes no time from other peers. Knows peers and sizes; knows nothing of
messages.

`RouterSocket` limits the connections of each endpoint; ZeroMQ would accept connections until no file descriptor is
left, and then end the process. A full unix socket stops listening, and new connections wait in the system's queue. A
port can't stop listening, so excess connections to it are closed, and may try again.

`ClientSocket` is the clients' socket. Invalid frames are counted and, if their request can be read, answered. Knows
routing ids; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.orchestrator.auth import client_of
from outrider.protocol import clock
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode, encode, request_of
from outrider.protocol.endpoints import Bound, bind
from outrider.protocol.errors import EndpointError, OutriderError, ProtocolError, ServerBusy, kind_of
from outrider.protocol.keys import ServerKeys, key_shown
from outrider.protocol.messages import Failed, Message

log = logging.getLogger(__name__)

BYTES = 16 * 1024
"""A message counts as one more for each of these bytes."""
MOST_PEERS = 64
"""With fewer peers idle ones are not dropped."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of messages per second, with a `reserve` of messages for bursts."""

    a_second: float
    reserve: float


class RateLimiter:
    """Applies one rate to each peer of a socket."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._full_ns: dict[bytes, int] = {}  # when each peer's reserve will be full
        self._over: set[bytes] = set()
        self._most = MOST_PEERS

    def allow(self, peer: bytes, frames: Iterable[bytes | memoryview], now_ns: int) -> bool:
        """Whether the peer may send this much now."""
        full_ns = self._full_ns.get(peer, now_ns)
        if full_ns <= now_ns:
            full_ns = now_ns
            self._over.discard(peer)
            self._forget_idle(now_ns)
        cost, reserve = 1 + sum(map(len, frames)) / BYTES, self._rate.reserve
        # A message larger than the reserve passes if the reserve is full: sizes have a limit of their own.
        if reserve - (full_ns - now_ns) / SECOND_NS * self._rate.a_second < min(cost, reserve):
            return False
        self._full_ns[peer] = full_ns + int(cost / self._rate.a_second * SECOND_NS)
        return True

    def is_first(self, peer: bytes) -> bool:
        """Whether this refusal, the one to report, is the peer's first since its reserve was full."""
        is_first = peer not in self._over
        self._over.add(peer)
        return is_first

    def _forget_idle(self, now_ns: int) -> None:
        """Drops peers whose reserve is full. Checks them only when their number has doubled."""
        if len(self._full_ns) >= self._most:
            self._full_ns = {peer: full_ns for peer, full_ns in self._full_ns.items() if full_ns > now_ns}
            self._over &= self._full_ns.keys()
            self._most = max(2 * len(self._full_ns), MOST_PEERS)


CROWDED = 0.875


@dataclass(slots=True)
class LimitedEndpoint:
    """An endpoint for at most `most` connections: those `inside`, as file descriptors that ZeroMQ reports."""

    bound: Bound
    most: int
    inside: set[int] = field(default_factory=set)


class RouterSocket:
    """A ROUTER whose endpoints have limits of connections; `socket` and `monitor` are what to poll. Used by one thread.

    Call `watch` whenever `monitor` is readable. `most`: connections. `unsent`, `unread`: the most messages queued for a
    peer, and for this process.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    linger_ms = 0

    def __init__(self, context: zmq.Context[Any], endpoint: str, most: int, unsent: int, unread: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, unsent)
        self.socket.setsockopt(zmq.RCVHWM, unread)
        self.endpoints: list[LimitedEndpoint] = []
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.open(endpoint, most)
        except EndpointError:
            self.close()
            raise

    def open(self, endpoint: str, most: int, keys: ServerKeys | None = None) -> Bound:
        """Serves one more endpoint with a limit of its own, so that a full one leaves room at another.

        Endpoints without keys come first; see `bind`.

        Raises:
            EndpointError: it can't be served.
        """
        bound = bind(self.socket, endpoint, keys)
        self.endpoints.append(LimitedEndpoint(bound, most))
        return bound

    def arrived(self) -> Iterator[tuple[zmq.Frame, list[bytes]]]:
        """Yields the sender's routing id, which also holds its key (`key_shown`), and frames; never blocks."""
        while True:
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield first, self.socket.recv_multipart()

    @property
    def crowded(self) -> bool:
        """Whether an endpoint is nearly full: new work must be refused while there is still room to answer."""
        return any(len(endpoint.inside) >= CROWDED * endpoint.most for endpoint in self.endpoints)

    def watch(self) -> None:
        """Counts connections that were opened and closed; stops or resumes listening."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                endpoint = self._at(event["endpoint"].decode())
                endpoint.inside.add(event["value"])
                if len(endpoint.inside) > endpoint.most:
                    endpoint.bound.hang_up(event["value"])  # from a port, which can't stop listening
            else:
                for endpoint in self.endpoints:
                    endpoint.inside.discard(event["value"])
        for endpoint in self.endpoints:
            if len(endpoint.inside) >= endpoint.most:
                endpoint.bound.stop_listening()
            else:
                endpoint.bound.listen()

    def close(self) -> None:
        """Closes the socket and frees the endpoints; pending messages have `linger_ms` milliseconds to leave."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        for endpoint in self.endpoints:
            endpoint.bound.close(self.linger_ms)
        self.socket.close(self.linger_ms)

    def _at(self, address: str) -> LimitedEndpoint:
        """Returns the endpoint at an address; ZeroMQ may spell that of one, the last, differently."""
        return next((end for end in self.endpoints if end.bound.endpoint == address), self.endpoints[-1])


SEND_QUEUE, RECEIVE_QUEUE = 20_000, 256  # messages of each connection
CLIENTS = Rate(2_000, 5_000)
TOO_MUCH = f"this client sends more than {CLIENTS.a_second:,.0f} messages a second; retry more slowly"
MOST = 1024
FLUSH_MS = 500


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message, its sender's routing id, and its sender's key (empty: none was required)."""

    sender: bytes
    message: Message
    key: str = ""


class ClientSocket(RouterSocket):
    """The clients' socket, bound on creation. With `open` it also serves clients with keys.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    linger_ms = FLUSH_MS

    def __init__(self, context: zmq.Context[Any], endpoint: str, most: int = MOST) -> None:
        super().__init__(context, endpoint, most, SEND_QUEUE, RECEIVE_QUEUE)
        self.rejected = 0
        self._rate_limiter = RateLimiter(CLIENTS)

    @property
    def endpoint(self) -> str:
        """The endpoint for clients, the last that was opened."""
        return self.endpoints[-1].bound.endpoint

    @property
    def own(self) -> str:
        """The endpoint for this server's other processes."""
        return self.endpoints[0].bound.endpoint

    def receive(self, most: int) -> Iterator[ClientMessage]:
        """Yields up to `most` waiting messages."""
        for first, frames in islice(self.arrived(), most):
            sender = first.bytes
            client = client_of(sender)
            if not self._rate_limiter.allow(client, frames, clock.now()):
                if self._rate_limiter.is_first(client):
                    log.warning("a client sends too many messages: refusing more than %.0f a second", CLIENTS.a_second)
                self._reject(sender, frames, ServerBusy(TOO_MUCH))
                continue
            try:
                yield ClientMessage(sender, decode(frames), key_shown(first))
            except ProtocolError as error:
                self._reject(sender, frames, error)

    def send(self, to: bytes, message: Message) -> bool:
        """Sends a message; returns False if the client is gone or has left too many messages unread."""
        try:
            self.socket.send_multipart([to, *encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("can't send to a client: %s", error.strerror)
            return False
        return True

    def _reject(self, sender: bytes, frames: list[bytes], error: OutriderError) -> None:
        self.rejected += 1
        request = request_of(frames)
        log.info("rejected a message: %s", error)
        if request is not None:
            self.send(sender, Failed(request, kind_of(error), str(error)))
