"""The orchestrator's ROUTER sockets, with limits on the messages of a peer and the connections of an endpoint.

Knows routing ids; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zmq

from outrider.orchestrator.auth import CurveAuth, client_id_of
from outrider.protocol import clock
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode, encode, read_request_id
from outrider.protocol.endpoints import BoundSocket, receive_event
from outrider.protocol.errors import EndpointError, KeyFault, OutriderError, ProtocolError, ServerBusy
from outrider.protocol.keys import CLIENT, KeyPair, sender_key
from outrider.protocol.messages import Failed, Message

log = logging.getLogger(__name__)

BYTES_PER_MESSAGE = 16 * 1024
"""A message costs 1, plus 1 for each block of this size."""
MIN_PEERS_TO_FORGET = 64
"""Idle peers are forgotten only if at least this many are known."""

CROWDED_RATIO = 0.875
MAX_SEND_QUEUE, MAX_RECEIVE_QUEUE = 20_000, 256  # messages of each connection
MAX_CONNECTIONS = 1024
FLUSH_MS = 500


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of messages per second, with a `reserve` of messages for bursts."""

    per_second: float
    reserve: float


# Peers must not fill the log: ten warnings at once, then one every ten seconds.
WARNING_RATE = Rate(0.1, 10)


class RateLimiter:
    """Applies one rate to each peer of a socket. Messages beyond it are dropped before they are decoded, so a flood
    takes no time from other peers."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._full_ns: dict[bytes, int] = {}  # when each peer's reserve will be full
        self._forget_at = MIN_PEERS_TO_FORGET

    def allow(self, peer: bytes, frames: Iterable[bytes | memoryview], now_ns: int) -> bool:
        """Returns whether the peer may send this message now; if so, its cost is taken from the reserve."""
        full_ns = self._full_ns.get(peer, now_ns)
        if full_ns <= now_ns:
            full_ns = now_ns
            self._forget_idle(now_ns)
        cost, reserve = 1 + sum(map(len, frames)) / BYTES_PER_MESSAGE, self._rate.reserve
        # A message larger than the reserve passes if the reserve is full, since there is a separate limit on size.
        if reserve - (full_ns - now_ns) / SECOND_NS * self._rate.per_second < min(cost, reserve):
            return False
        self._full_ns[peer] = full_ns + int(cost / self._rate.per_second * SECOND_NS)
        return True

    def _forget_idle(self, now_ns: int) -> None:
        """Forgets peers whose reserve is full. Looks for them only when the number of peers has doubled."""
        if len(self._full_ns) >= self._forget_at:
            self._full_ns = {peer: full_ns for peer, full_ns in self._full_ns.items() if full_ns > now_ns}
            self._forget_at = max(2 * len(self._full_ns), MIN_PEERS_TO_FORGET)


class RouterSocket:
    """A ROUTER whose endpoints limit their connections; poll its `socket` and `monitor`. Used by one thread.

    ZeroMQ would accept connections until no file descriptor is left, and then end the process. Therefore excess
    connections are closed; their clients connect again, several times a second.

    Call `update_connections` whenever `monitor` is readable. `limit`: connections. `send_hwm`, `recv_hwm`: messages
    that may be queued for a peer, and for this process.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    linger_ms = 0

    def __init__(self, context: zmq.Context[Any], endpoint: str, limit: int, send_hwm: int, recv_hwm: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, send_hwm)
        self.socket.setsockopt(zmq.RCVHWM, recv_hwm)
        self.endpoints: list[BoundSocket] = []
        self._warnings = RateLimiter(WARNING_RATE)
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.open(endpoint, limit)
        except EndpointError:
            self.close()
            raise

    def open(self, endpoint: str, limit: int, own: KeyPair | None = None, role: str = "") -> BoundSocket:
        """Serves one more endpoint, with its own limit: a full endpoint doesn't block another.

        Endpoints without keys come first; see `BoundSocket`.

        Raises:
            EndpointError: it can't be served.
        """
        self.endpoints.append(BoundSocket(self.socket, endpoint, own, role, limit))
        return self.endpoints[-1]

    def receive_waiting(self) -> Iterator[tuple[zmq.Frame, list[bytes]]]:
        """Yields the routing id of each message's sender, with its key (`sender_key`), and the frames; never blocks."""
        while True:
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield first, self.socket.recv_multipart()

    def warn(self, message: str, *values: object) -> None:
        """Logs a warning about an event that a peer can cause at will, at a limited rate."""
        level = logging.WARNING if self._warnings.allow(b"", (), clock.now()) else logging.INFO
        log.log(level, message, *values)

    def is_nearly_full(self, with_keys: bool) -> bool:
        """Whether the endpoint with keys (or without) is nearly full, so that new requests must be refused."""
        endpoint = self.endpoints[-1 if with_keys else 0]
        return len(endpoint.open_fds) >= CROWDED_RATIO * endpoint.max_connections

    def update_connections(self) -> None:
        """Handles events of connections that were opened or closed; closes those beyond the limit."""
        while self.monitor.poll(0):
            event, fd, address = receive_event(self.monitor)
            if event == zmq.EVENT_ACCEPTED:
                named = (end for end in self.endpoints if end.endpoint == address)
                endpoint = next(named, self.endpoints[-1])  # ZeroMQ may spell the last one's address differently
                endpoint.open_fds.add(fd)
                if len(endpoint.open_fds) > endpoint.max_connections:
                    endpoint.close_connection(fd)
            else:
                for endpoint in self.endpoints:
                    endpoint.open_fds.discard(fd)

    def close(self) -> None:
        """Closes the socket and frees the endpoints; pending messages have `linger_ms` milliseconds to leave."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        for endpoint in self.endpoints:
            endpoint.close(self.linger_ms)
        self.socket.close(self.linger_ms)


CLIENT_RATE = Rate(2_000, 5_000)
TOO_MANY_MESSAGES = f"this client sends more than {CLIENT_RATE.per_second:,.0f} messages a second; retry more slowly"


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message, its sender's routing id, and its sender's key (empty: none was required)."""

    sender: bytes
    message: Message
    key: str = ""


class ClientSocket(RouterSocket):
    """The clients' socket, bound on creation. With `open` it also serves clients with keys, which `auth` admits.
    Invalid frames are counted and, if their request can be read, answered.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    linger_ms = FLUSH_MS

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, limit: int = MAX_CONNECTIONS, auth: CurveAuth | None = None
    ) -> None:
        super().__init__(context, endpoint, limit, MAX_SEND_QUEUE, MAX_RECEIVE_QUEUE)
        self.auth = auth
        self.rejected = 0
        self._rate_limiter = RateLimiter(CLIENT_RATE)

    @property
    def endpoint(self) -> str:
        """The endpoint for clients, the last that was opened."""
        return self.endpoints[-1].endpoint

    @property
    def own_endpoint(self) -> str:
        """The endpoint for this server's other processes."""
        return self.endpoints[0].endpoint

    def check_key(self, key: str) -> None:
        """Checks the key of a connected client. Raises KeyFault if it was revoked since."""
        if key and self.auth is not None and not self.auth.is_allowed(CLIENT, key):
            raise KeyFault("this side's key is no longer allowed; allow it on the server with `outrider keys allow`")

    def receive(self, limit: int) -> Iterator[ClientMessage]:
        """Yields up to `limit` waiting messages."""
        for first, frames in islice(self.receive_waiting(), limit):
            sender = first.bytes
            if not self._rate_limiter.allow(client_id_of(sender), frames, clock.now()):
                self.warn("a client sends too many messages: refusing more than %.0f a second", CLIENT_RATE.per_second)
                self._reject(sender, frames, ServerBusy(TOO_MANY_MESSAGES))
                continue
            try:
                yield ClientMessage(sender, decode(frames), sender_key(first))
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
        request = read_request_id(frames)
        log.info("rejected a message: %s", error)
        if request is not None:
            self.send(sender, Failed(request, type(error).__name__, str(error)))
