"""A client that has said all it has to say: it may still listen, as `nc` and old clients do, or be gone.

The system tells both alike until something is written that nobody takes. So a client of HTTP/1.1 that waits for its
answer's beginning is sent a `100 Continue`, which means nothing to it, and what becomes of that is looked at; once an
answer has begun, its own words do the same.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import h11

LOOK_SECONDS = 0.02


class HalfClosed:
    """Closes `transport` as soon as it is known that nobody listens; until `end`."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._socket = cast(socket.socket, transport.get_extra_info("socket"))
        self._next = loop.call_later(LOOK_SECONDS, self._look)

    def end(self) -> None:
        self._next.cancel()

    def _look(self) -> None:
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            self._next = self._loop.call_later(LOOK_SECONDS, self._look)


def go_on(connection: h11.Connection) -> bytes:
    """A word that means nothing, where one may be said; else none."""
    version = connection.their_http_version
    if connection.our_state is not h11.SEND_RESPONSE or version is None or version < b"1.1":
        return b""
    return connection.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
