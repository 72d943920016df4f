"""Server-sent events: streamed responses that end when their client disconnects.

A stream that fails after its start reports the error in an event of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.protocol.errors import OutriderError
from outrider.server.answers.formatter import AnswerFormatter
from outrider.server.answers.run import RequestRun
from outrider.server.auth_middleware import ClientDisconnected
from outrider.server.connection import chunk_writer
from outrider.server.problems import Refused, problem_of

END = {"type": "http.response.body", "body": b"", "more_body": False}
T = TypeVar("T")


class EventStream(Response):
    """A response that writes the items of `run` as `events` formats them, and closes `run` at its end."""

    media_type = "text/event-stream"

    def __init__(self, run: RequestRun, events: AnswerFormatter) -> None:
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
            await send(END)
            raise
        await send(END)


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
