"""Runs one HTTP request's choices at the orchestrator, concurrently, and returns their parts in one order.

The queue is unbounded: a slow reader gets all text since its last read at once, and delays no other reader.

`EventStream` is the streamed response, server-sent events, which ends when its client disconnects. A stream that fails
after its start reports the error in an event of its API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncStream
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult
from outrider.protocol.errors import OutriderError
from outrider.server.answers.formatter import AnswerFormatter, AnswerPlan
from outrider.server.answers.parts import (
    UNFINISHED,
    ChoiceState,
    KeepAlive,
    StreamItem,
    merged,
)
from outrider.server.connection import chunk_writer
from outrider.server.metrics import ChoiceTimer
from outrider.server.problems import Refused, problem_of

SILENCE_SECONDS = 4.0
"""A stream sends a keep-alive after as long without a result."""

log = logging.getLogger(__name__)
T = TypeVar("T")


StartTimer = Callable[[ChoiceState], ChoiceTimer]
"""Starts the timer of a choice."""


class RequestRun:
    """Starts on creation. Call `next` until `over`, then `close`, which cancels what still runs and calls `release`.

    A choice ends with an error after `longest` seconds, or its own
    timeout. `caller` identifies the user to an orchestrator with several.
    """

    def __init__(
        self,
        client: AsyncBaseClient,
        plan: AnswerPlan,
        watch: StartTimer,
        release: Callable[[], None],
        longest: float | None,
        caller: str,
    ) -> None:
        self._client = client
        self._choices = plan.choices
        self._caller = caller
        self._watch = watch
        self._release = release
        self._longest = longest
        self._line = asyncio.Queue[StreamItem | Exception]()
        self._first: list[StreamItem] = []
        self._streams: dict[int, AsyncStream] = {}
        self._tasks = [asyncio.create_task(self._complete(choice)) for choice in plan.choices]

    @property
    def over(self) -> bool:
        """Whether all choices are complete and their results were returned."""
        is_read = not self._first and self._line.empty()
        return is_read and all(choice.result is not UNFINISHED for choice in self._choices)

    async def begun(self, patience: float) -> None:
        """Waits for the first result, at most `patience` seconds.

        Raises:
            OutriderError: the request failed by then.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                self._first = await self._ready()

    async def next(self) -> list[StreamItem]:
        """Waits for new items, and returns them in order, or a keep-alive; consecutive text of a choice is joined.

        Raises:
            OutriderError: a choice failed, which fails the request.
        """
        found, self._first = self._first or await self._ready(), []
        for index in [index for index in self._streams if self._choices[index].finish]:
            await self._streams.pop(index).end()  # its result follows
        return found

    async def whole(self) -> list[ChoiceState]:
        """Returns all choices, finished.

        Raises:
            OutriderError: one failed.
        """
        while not self.over:
            await self.next()
        return self._choices

    async def _ready(self) -> list[StreamItem]:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                ready = [await self._line.get()]
        except TimeoutError:
            return [KeepAlive("still here")]
        while not self._line.empty():
            ready.append(self._line.get_nowait())
        found: list[StreamItem] = []
        for one in ready:
            if isinstance(one, Exception):
                raise one
            both = merged(found[-1], one) if found else None
            if both is not None:
                found[-1] = both
            else:
                found.append(one)
        return found

    async def close(self) -> None:
        """Cancels unfinished choices, and waits until they are cancelled."""
        self._release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _complete(self, choice: ChoiceState) -> None:
        watch = self._watch(choice)
        result: GenerationResult | None = None
        failed: Exception | None = None
        limits = [limit for limit in (choice.timeout, self._longest) if limit is not None]

        def put(items: Sequence[StreamItem]) -> None:
            for item in items:
                self._line.put_nowait(item)

        def grown(chunk: Chunk) -> None:
            watch.grown(len(chunk.token_ids))
            put(choice.add(chunk))

        try:
            stream = self._streams[choice.index] = self._client.stream(
                choice.prompt,
                choice.sampling,
                **choice.speculation.model_dump(),
                client=self._caller,
                progress=lambda done, total: self._line.put_nowait(KeepAlive(f"prompt {done}/{total}")),
            )
            log.info("choice %d is %s", choice.index, stream.request, extra={"client_request": stream.request})
            async with asyncio.timeout(min(limits, default=None)):
                result = await stream.follow(grown)
            put(choice.end(result))
        except OutriderError as error:
            self._line.put_nowait(failed := error)
        except TimeoutError:
            late = f"the answer was not complete after {min(limits):g} s and was cancelled; set a longer timeout"
            self._line.put_nowait(failed := Refused(late, "timeout", 504, "timeout"))
        except Exception as error:
            self._line.put_nowait(failed := error)  # ends the reader's wait
            raise
        finally:
            self._streams.pop(choice.index, None)
            watch.ended(result, failed)


END = {"type": "http.response.body", "body": b"", "more_body": False}


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
        except ClientDisconnect:
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
        ClientDisconnect: the client left; `work` is cancelled.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
