"""uvicorn's HTTP/1.1 connection with limits and direct writes of streamed chunks."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable

import h11
from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from outrider.server.middleware import fresh_id
from outrider.server.problems import Problem

log = logging.getLogger(__name__)

_CYCLE_EXTENSION = "outrider.cycle"
HEADER_TIMEOUT_SECONDS = 20.0
READER_TIMEOUT_SECONDS = 120.0
CLOSE_TIMEOUT_SECONDS = 2.0
FILES_PER_CONNECTION = 4
"""Connections may use a quarter of the process's limit on open files; their requests need the rest."""


def chunk_writer(scope: Scope, send: Send) -> Callable[[bytes], Awaitable[None]]:
    """Returns a function that writes a chunk of a response, and waits while the write buffer is full.

    On this server's HTTP/1.1 connections it writes to the transport, bypassing the ASGI layers and h11, which would
    cost another 0.06 ms of CPU time per chunk; elsewhere with `send`, which starts and ends the response in either
    case.
    """
    cycle: RequestResponseCycle | None = scope.get("extensions", {}).get(_CYCLE_EXTENSION)

    async def write(data: bytes) -> None:
        if not data:  # an empty chunk would end the response
            return
        if cycle is None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    return write


class Connection(H11Protocol):
    """uvicorn's connection with time limits for headers and slow readers, a limit on open connections, and JSON
    errors."""

    _header_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_PER_CONNECTION
        if len(self.connections) > most:
            self._reject(Problem(f"{most} connections are open, the maximum; try again later", status=503))
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # a part of headers, or of a body that is not read
            self._start_header_timer()
        elif self._header_timer is not None:  # the headers have arrived
            self._header_timer.cancel()
            self._header_timer = None

    def handle_events(self) -> None:
        """Adds each new HTTP/1.1 request's cycle to its scope, for `chunk_writer`; HTTP/1.0 has no chunks."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.cycle.scope["http_version"] == "1.1":
            extensions: dict[str, object] = self.cycle.scope.setdefault("extensions", {})  # type: ignore[assignment]
            extensions[_CYCLE_EXTENSION] = self.cycle

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: an offered protocol is ignored, and Java's HTTP client offers one with each request."""

    def pause_writing(self) -> None:
        """Starts the reader's time limit, because the system's send buffer is full."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.transport.abort()  # even with unsent data

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():  # an idle client of TLS does not answer the close
            self.loop.call_later(CLOSE_TIMEOUT_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with a JSON error, or closes the connection if a response has started."""
        is_too_long = len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)
        too_long = Problem("the request's headers are too long", status=431)
        self._reject(too_long if is_too_long else Problem("this is not a valid HTTP request; expected HTTP/1.1"))

    def _reject(self, problem: Problem) -> None:
        """Answers unless a response has started, and closes the connection. The application's own answer is dropped."""
        is_known, name = self.conn.our_state is h11.SEND_RESPONSE, fresh_id()
        if is_known or self.conn.our_state is h11.IDLE:
            answer = problem.response(dict(self.scope) if is_known else {"headers": []}, name)
            headers = [*answer.raw_headers, (b"x-request-id", name.encode()), (b"connection", b"close")]
            start = h11.Response(status_code=problem.status, headers=headers)
            body = b"" if is_known and self.scope["method"] == "HEAD" else bytes(answer.body)
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

    def _watch_reader(self, before: int | None = None) -> None:
        """Closes the connection if the write buffer still has as many bytes as `before`."""
        unread = self.transport.get_write_buffer_size()
        if unread != before:
            self._reader_timer = self.loop.call_later(READER_TIMEOUT_SECONDS, self._watch_reader, unread)
            return
        log.warning("a client read nothing for %g s; closing its response", READER_TIMEOUT_SECONDS)
        self.transport.abort()
