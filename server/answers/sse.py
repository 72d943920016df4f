"""Server-Sent Events: a response whose events are written as they come, and whose end is its reader's, too.

A reader who leaves ends the run behind it; one who takes nothing for a while is made to (`connection.py`). A stream
that fails says so in an event of its own API and ends; its status has been sent long before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.protocol.errors import OutriderError
from outrider.server.pieces import Write, straight
from outrider.server.problems import Problem, Refused, problem_of

DONE = b"data: [DONE]\n\n"


def event(data: str, name: str | None = None) -> bytes:
    """One event; `data` is JSON, which has no line breaks."""
    return (f"event: {name}\n" if name is not None else "").encode() + f"data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """What keeps a connection alive and means nothing to its reader."""
    return f": {text}\n\n".encode()


class EventStream(Response):
    """`events` are written one after the other, and where they end with an error, that as `failed` writes it.

    `close` is awaited in the end, however it came.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], failed: Callable[[Problem], bytes], close: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._failed = failed
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = asyncio.create_task(self._tell(straight(scope, send), send))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_told = telling.done()
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)
            await self._close()
        if was_told:
            telling.result()

    async def _tell(self, write: Write, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await write(data)
        except (OutriderError, Refused) as error:
            await write(self._failed(problem_of(error)))
        except Exception as error:
            await write(self._failed(problem_of(error)))
            await self._end(send)
            raise
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Returns when the reader has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
