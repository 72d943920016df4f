"""The socket that clients connect to: whole messages in, whole messages out.

Invalid frames are counted and, where their request can be read, answered. Knows routing ids; knows nothing of requests.
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

UNREAD_MESSAGES = 20_000
UNHEARD_MESSAGES = 256  # of each connection, that wait for this process
CLIENTS = Rate(2_000, 5_000)
TOO_MUCH = f"this client says more than {CLIENTS.a_second:,.0f} things a second; ask again, more slowly"
MOST = 1024
FLUSH_MS = 500

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message, the routing id it came from, and its sender's key; empty: none was asked for."""

    sender: bytes
    message: Message
    key: str = ""


class ClientSocket:
    """Bound on creation, for `most` connections; used by one thread at a time.

    `endpoint` is where clients connect, `own` where this server's other processes do.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, most: int = MOST) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, UNHEARD_MESSAGES)
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
        """The same at one more endpoint, for clients with keys; it is `endpoint` from now on.

        Raises:
            EndpointError: it can't be served.
        """
        self.bound = self.limiter.open(endpoint, most, keys)

    def receive(self, most: int) -> Iterator[ClientMessage]:
        """Up to `most` messages that wait here."""
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
        """False when the client is gone or has left too many messages unread."""
        try:
            self.socket.send_multipart([to, *encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("can't send to a client: %s", error.strerror)
            return False
        return True

    def close(self) -> None:
        """Ends the socket and frees the endpoint; what clients have not got yet is given a moment."""
        self.limiter.close(linger_ms=FLUSH_MS)

    def _reject(self, sender: bytes, frames: list[bytes], error: OutriderError) -> None:
        self.rejected += 1
        request = request_of(frames)
        log.info("rejected a message: %s", error)
        if request is not None:
            self.send(sender, Failed(request, kind_of(error), str(error)))
