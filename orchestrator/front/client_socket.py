"""The clients' socket: receives and sends whole messages.

Invalid frames are counted and, if their request can be read, answered. Knows routing ids; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from outrider.orchestrator.auth import client_of
from outrider.orchestrator.limits import ConnectionLimiter, Rate, RateLimiter
from outrider.protocol import clock
from outrider.protocol.codec import decode, encode, request_of
from outrider.protocol.errors import EndpointError, OutriderError, ProtocolError, ServerBusy, kind_of
from outrider.protocol.keys import ServerKeys, key_shown
from outrider.protocol.messages import Failed, Message

SEND_QUEUE, RECEIVE_QUEUE = 20_000, 256  # messages of each connection
CLIENTS = Rate(2_000, 5_000)
TOO_MUCH = f"this client sends more than {CLIENTS.a_second:,.0f} messages a second; retry more slowly"
MOST = 1024
FLUSH_MS = 500

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message, its sender's routing id, and its sender's key (empty: none was required)."""

    sender: bytes
    message: Message
    key: str = ""


class ClientSocket:
    """A socket bound on creation, for `most` connections; used by one thread at a time.

    `endpoint` is for clients, `own` for this server's other processes.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, most: int = MOST) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self.rejected = 0
        self._rate_limiter = RateLimiter(CLIENTS)
        try:
            self.limiter = ConnectionLimiter(self.socket, endpoint, most)
        except EndpointError:
            self.socket.close(linger=0)
            raise
        self.bound = self.limiter.bound
        self.own = self.limiter.bound.endpoint

    @property
    def endpoint(self) -> str:
        return self.bound.endpoint

    def serve(self, endpoint: str, most: int, keys: ServerKeys) -> None:
        """Binds one more endpoint, for clients with keys, which is `endpoint` from now on.

        Raises:
            EndpointError: it can't be served.
        """
        self.bound = self.limiter.open(endpoint, most, keys)

    def receive(self, most: int) -> Iterator[ClientMessage]:
        """Yields up to `most` waiting messages."""
        for _ in range(most):
            if not self.socket.poll(0):
                return
            first = self.socket.recv(copy=False)
            sender, frames = first.bytes, self.socket.recv_multipart()
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

    def close(self) -> None:
        """Closes the socket and frees the endpoint; pending messages get a moment to leave."""
        self.limiter.close(linger_ms=FLUSH_MS)

    def _reject(self, sender: bytes, frames: list[bytes], error: OutriderError) -> None:
        self.rejected += 1
        request = request_of(frames)
        log.info("rejected a message: %s", error)
        if request is not None:
            self.send(sender, Failed(request, kind_of(error), str(error)))
