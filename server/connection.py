"""A connection that has to go on: headers come to their end, what is written is read, and there are not too many.

uvicorn waits for the headers of a request that has begun, and for a reader that takes nothing, as long as it takes, and
lets any number in until the process has no files left. What is no HTTP is answered in its own words, not in the API's.
"""

from __future__ import annotations

import asyncio
import logging
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.server.door import is_anthropic
from outrider.server.half_closed import HalfClosed, go_on
from outrider.server.pieces import offer
from outrider.server.problems import Problem
from outrider.server.witness import fresh_id

HEADER_SECONDS = 20.0
READER_SECONDS = 120.0
SHARE = 4
"""One in so many of the files that this process may open is for connections; the others are for what they ask."""

log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many are let in at once."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE


class Connection(H11Protocol):
    """uvicorn's own, with a time for headers and for readers."""

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = most_connections()
        if len(self.connections) > most:
            self._turn_away(Problem(503, f"{most} connections are open, the maximum; try again later"))
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_headers()
        else:
            self._headers_came()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            offer(self.cycle)

    def pause_writing(self) -> None:
        """There is more to be read than the system holds for the reader."""
        super().pause_writing()
        self._unread = self.loop.call_later(READER_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        self._was_read()
        super().resume_writing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays: for who has asked, and says only that nothing more will come."""
        asked = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self.cycle.response_complete
        if not asked or self.scheme == "https":  # TLS ends both ways at once
            return False
        self.transport.write(go_on(self.conn))
        self._half_closed = HalfClosed(self.transport, self.loop)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed is not None and self.cycle.response_complete:  # nothing follows that was asked before
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.transport.abort()  # what is still unread after this time keeps nothing open

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        self._was_read()
        if self._half_closed is not None:
            self._half_closed.end()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. An answer that has begun already ends where it is."""
        too_long = len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        elif too_long:
            self._turn_away(Problem(431, "the request's headers are too long"))
        else:
            self._turn_away(Problem(400, "this is not a valid HTTP request; expected HTTP/1.1"))

    def _turn_away(self, problem: Problem) -> None:
        asked = self.conn.our_state is h11.SEND_RESPONSE
        name = fresh_id()
        body = problem.body(asked and is_anthropic(dict(self.scope)), name)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": name,
            "connection": "close",
            **problem.headers,
        }
        answer = h11.Response(status_code=problem.status, headers=list(headers.items()))
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_headers(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _headers_came(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        log.warning("a client read nothing for %g s; closing its response", READER_SECONDS)
        self.transport.abort()
