"""Server-sent events: streamed responses that end when their client disconnects.

A stream that fails after its start reports the error in an event of its API.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.protocol.errors import OutriderError
from outrider.server.answers.parts import StreamItem
from outrider.server.answers.run import RequestRun
from outrider.server.auth_middleware import ClientDisconnected
from outrider.server.connection import chunk_writer
from outrider.server.problems import Problem, Refused, problem_of

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: str, name: str | None = None) -> bytes:
    """Returns one event. `data` is JSON without line breaks."""
    return (f"event: {name}\n" if name is not None else "").encode() + f"data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """Returns a comment, which keeps the connection alive and which clients ignore."""
    return f": {text}\n\n".encode()


class EventWriter(Protocol):
    """Writes stream items as events of one API. Each method may return several events, or none."""

    def begin(self) -> bytes:
        """The events at the start."""

    def of(self, one: StreamItem) -> bytes:
        """The events of one item."""

    def end(self) -> bytes:
        """The events after the last choice."""

    def failed(self, problem: Problem) -> bytes:
        """The event of an error."""


class EventStream(Response):
    """A response that writes the items of `run` as `events` formats them, and closes `run` at its end."""

    media_type = "text/event-stream"

    def __init__(self, run: RequestRun, events: EventWriter) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._write(chunk_writer(scope, send), send), receive)
        except ClientDisconnected:
            pass
        finally:
            await self._run.close()

    async def _write(self, write: Callable[[bytes], Awaitable[None]], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await write(self._events.begin())
            while not self._run.over:
                for one in await self._run.next():
                    await write(self._events.of(one))
            await write(self._events.end())
        except (OutriderError, Refused) as error:
            await write(self._events.failed(problem_of(error)))
        except Exception as error:
            await write(self._events.failed(problem_of(error)))
            await self._end(send)
            raise
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Returns the result of `work`.

    Raises:
        ClientDisconnected: the client left; `work` is cancelled.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


_PLACE = secrets.token_hex(16)


class Stencil:
    """An event that is serialized once and then filled with each chunk's text.

    `written` returns the event for a text, which must occur in it once, as JSON.
    """

    def __init__(self, written: Callable[[str], bytes]) -> None:
        self._before, self._after = written(_PLACE).split(to_json(_PLACE))

    def filled(self, text: str) -> bytes:
        """Returns the event with this text."""
        return self._before + to_json(text) + self._after
