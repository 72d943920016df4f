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
from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.choices import UNFINISHED, AnswerPlan, ChoiceState, KeepAlive, StreamItem, merged
from outrider.server.answers.formatter import AnswerFormatter
from outrider.server.connection import chunk_writer
from outrider.server.metrics import ChoiceTimer
from outrider.server.problems import Refused, problem_of

FIRST_SECONDS = 0.5
"""How long a stream waits for its first result before its status 200 is sent."""
SILENCE_SECONDS = 4.0
"""A stream sends a keep-alive after as long without a result."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class RequestRun:
    """Starts on creation. Call `next` until `over`, then `close`, which cancels what still runs and calls `release`.

    A choice ends with an error after `longest` seconds, or the request's own timeout. `caller` identifies the user to
    an orchestrator with several.
    """

    def __init__(
        self,
        client: AsyncBaseClient,
        plan: AnswerPlan,
        start_timer: Callable[[int, SamplingParams], ChoiceTimer],
        release: Callable[[], None],
        longest: float | None,
        caller: str,
    ) -> None:
        self._client = client
        self._choices = plan.choices
        self._options = {**plan.speculation, "client": caller}
        self._timeout = min((limit for limit in (plan.timeout, longest) if limit is not None), default=None)
        self._start_timer = start_timer
        self._release = release
        self._line = asyncio.Queue[StreamItem | Exception]()
        self._streams: dict[int, AsyncStream] = {}
        self._tasks = [asyncio.create_task(self._complete(choice)) for choice in plan.choices]

    @property
    def over(self) -> bool:
        """Whether all choices are complete and their results were returned."""
        return self._line.empty() and all(choice.result is not UNFINISHED for choice in self._choices)

    async def finish(self) -> None:
        """Waits until all choices are complete.

        Raises:
            OutriderError: one failed.
        """
        while not self.over:
            await self.next()

    async def next(self) -> list[StreamItem]:
        """Waits for new items as `ready`, and returns a keep-alive if there is none for a while."""
        return await self.ready(SILENCE_SECONDS) or [KeepAlive("still here")]

    async def ready(self, patience: float) -> list[StreamItem]:
        """Waits for new items, at most `patience` seconds, and returns them in order; consecutive text of a choice is
        joined.

        Raises:
            OutriderError: a choice failed, which fails the request.
        """
        try:
            async with asyncio.timeout(patience):
                ready = [await self._line.get()]
        except TimeoutError:
            return []
        while not self._line.empty():
            ready.append(self._line.get_nowait())
        for index in [index for index in self._streams if self._choices[index].finish]:
            await self._streams.pop(index).end()  # its result follows
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
        timer = self._start_timer(choice.index, choice.sampling)
        result: GenerationResult | None = None
        failed: Exception | None = None

        def put(items: Sequence[StreamItem]) -> None:
            for item in items:
                self._line.put_nowait(item)

        def grown(chunk: Chunk) -> None:
            timer.grown(len(chunk.token_ids))
            put(choice.add(chunk))

        try:
            stream = self._streams[choice.index] = self._client.stream(
                choice.prompt.tokens,
                choice.sampling,
                **self._options,
                progress=lambda done, total: self._line.put_nowait(KeepAlive(f"prompt {done}/{total}")),
            )
            log.info("choice %d is %s", choice.index, stream.request, extra={"client_request": stream.request})
            async with asyncio.timeout(self._timeout):
                result = await stream.follow(grown)
            put(choice.end(result))
        except OutriderError as error:
            self._line.put_nowait(failed := error)
        except TimeoutError:
            late = f"the answer was not complete after {self._timeout:g} s and was cancelled; set a longer timeout"
            self._line.put_nowait(failed := Refused(late, "timeout", 504, "timeout"))
        except Exception as error:
            self._line.put_nowait(failed := error)  # ends the reader's wait
            raise
        finally:
            self._streams.pop(choice.index, None)
            timer.ended(result, failed)


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
            items = await self._run.ready(FIRST_SECONDS)  # early errors get their own HTTP status
            with suppress(ClientDisconnect):
                await while_connected(self._write(items, chunk_writer(scope, send), send), receive)
        finally:
            await self._run.close()

    async def _write(self, items: list[StreamItem], write: Callable[[bytes], Awaitable[None]], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await write(self._events.begin())
            while True:
                for one in items:
                    await write(self._events.of(one))
                if self._run.over:
                    break
                items = await self._run.next()
            await write(self._events.end())
        except OutriderError as error:
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
