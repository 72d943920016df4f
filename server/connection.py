"""A connection whose requests have to come to the end of their headers: who lets them drip is not waited for.

uvicorn waits between requests only, and for the headers of one that has begun as long as it takes.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0


class Connection(H11Protocol):
    """uvicorn's own, with a time for headers."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_headers()
        elif self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.close)
