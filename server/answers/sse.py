"""Server-Sent Events: a response whose events are written as they come, and whose end is its reader's, too.

A reader who leaves ends the run behind it; one who takes nothing for a while is made to (`connection.py`). A stream
that fails says so in an event of its own API and ends; its status has been sent long before.

`Stencil`: an event whose text alone changes from chunk to chunk: written once by its shape, and filled in from then
on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.protocol.errors import OutriderError
from outrider.server.answers.part_stream import PartStream, Words
from outrider.server.answers.run import News
from outrider.server.connection import ChunkWriter, DirectChunkWriter, chunk_writer
from outrider.server.problems import Problem, Refused, problem_of

DONE = b"data: [DONE]\n\n"


def event(data: str, name: str | None = None) -> bytes:
    """One event; `data` is JSON, which has no line breaks."""
    return (f"event: {name}\n" if name is not None else "").encode() + f"data: {data}\n\n".encode()


def failed(problem: Problem) -> bytes:
    """An error in the middle of a stream, as OpenAI's two older APIs have it."""
    return event(problem.body(anthropic=False, request_id="").decode())


def comment(text: str) -> bytes:
    """What keeps a connection alive and means nothing to its reader."""
    return f": {text}\n\n".encode()


class EventWriter(Protocol):
    """An API's way to write what is told; an event or several, or none."""

    def begin(self) -> bytes:
        """What comes before all else."""

    def of(self, one: Words) -> bytes:
        """What tells this."""

    def end(self) -> bytes:
        """What comes when all choices are at their end."""

    def failed(self, problem: Problem) -> bytes:
        """An error in the middle."""


class EventStream(Response):
    """What is told, as `events` write it; closes `parts` in the end, however it came.

    Text is written in the very turn of the loop that brings it, with no task between, as long as nothing waits to be
    written; all else, and text for a reader who is late, by the task that runs this.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: PartStream, events: EventWriter) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = asyncio.create_task(self._tell(chunk_writer(scope, send), send))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_told = telling.done()
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)
            await self._parts.close()
        if was_told:
            telling.result()

    async def _tell(self, to: ChunkWriter, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await to.write(self._events.begin())
            at_once = partial(self._at_once, to) if isinstance(to, DirectChunkWriter) else None
            while not self._parts.over:
                for one in await self._parts.next(at_once):
                    await to.write(self._events.of(one))
            await to.write(self._events.end())
        except (OutriderError, Refused) as error:
            await to.write(self._events.failed(problem_of(error)))
        except Exception as error:
            await to.write(self._events.failed(problem_of(error)))
            await self._end(send)
            raise
        await self._end(send)

    def _at_once(self, to: DirectChunkWriter, news: News | Exception) -> bool:
        """Whether there was room for it, and it is more text."""
        told = self._parts.text(news) if to.is_free else None
        for one in told or ():
            to.put(self._events.of(one))
        return told is not None

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Returns when the reader has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


_PLACE = secrets.token_hex(16)


class Stencil:
    """`written` is the event with a text; the text stands in it once, as JSON."""

    def __init__(self, written: Callable[[str], bytes]) -> None:
        self._before, self._after = written(_PLACE).split(to_json(_PLACE))

    def filled(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + to_json(text) + self._after
