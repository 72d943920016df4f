"""Connections of uvicorn's: their limits, clients that have said all, and answers in pieces.

`Connection`: a connection that has to go on: headers come to their end, what is written is read, and there are not too
many. uvicorn waits for the headers of a request that has begun, and for a reader that takes nothing, as long as it
takes, and lets any number in until the process has no files left. What is no HTTP is answered in its own words, not in
the API's.

`HalfClosed`: a client that has said all it has to say: it may still listen, as `nc` and old clients do, or be gone.
The system tells both alike until something is written that nobody takes. So a client of HTTP/1.1 that waits for its
answer's beginning is sent a `100 Continue`, which means nothing to it, and what becomes of that is looked at; once an
answer has begun, its own words do the same.

`ChunkWriter`: the pieces of a streamed answer, written straight to its connection. In ASGI each of them would pass
every layer of the application, and h11, though all of these only look at how an answer begins and ends. Knows uvicorn's
connections, and how HTTP/1.1 marks a piece.

`Server`: uvicorn's server, which sleeps while nobody asks. Its own looks ten times a second whether it is to end; in a
process that has left the caches each look costs as much as half a chunk of text.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from contextlib import suppress
from types import FrameType
from typing import cast

import h11
import uvicorn
from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from outrider.server.access_log import fresh_id
from outrider.server.auth_middleware import is_anthropic
from outrider.server.problems import Problem

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


_NAME = "outrider.pieces"


class ChunkWriter:
    """Of an answer that has begun by `send`, and is to end by it, written as any answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more."""
        if data:  # an empty piece would be the end
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class DirectChunkWriter(ChunkWriter):
    """Written to the connection itself."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__(cycle.send)  # type: ignore[arg-type]
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """Whether the reader keeps up, so that something can be `put`."""
        return not self._cycle.flow.write_paused

    def put(self, data: bytes) -> None:
        """Writes without waiting; whoever has left gets nothing."""
        if data and not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()
        self.put(data)


def offer(cycle: RequestResponseCycle) -> None:
    """Has `chunk_writer` find the way to this answer's connection; not in HTTP/1.0, where pieces have no marks."""
    if cycle.scope["http_version"] == "1.1":
        extensions: dict[str, object] = cycle.scope.setdefault("extensions", {})  # type: ignore[assignment]
        extensions[_NAME] = DirectChunkWriter(cycle)


def chunk_writer(scope: Scope, send: Send) -> ChunkWriter:
    """Of the answer in this scope: straight ones where its connection offers that."""
    found: ChunkWriter = scope.get("extensions", {}).get(_NAME) or ChunkWriter(send)
    return found


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


TICK_SECONDS = 1.0
"""So often the date in answers is renewed."""


class Server(uvicorn.Server):
    """Serves until `end`, or a signal."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._word = asyncio.Event()

    def end(self) -> None:
        """Ends it in order, from any thread."""
        self.should_exit = True
        self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # of its ticks the one that tells the time
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._word.wait()

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._word.set)
