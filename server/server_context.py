"""The state that endpoints share, and the run of each request until it ends or its client disconnects.

A caller is identified by API key, or by address if it sends none. The choices of a request run concurrently, and their
parts form one sequence. Its queue is unbounded: a slow reader delays no other reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, Self, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient, AsyncStream
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult
from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import OutriderError, ServerBusy
from outrider.protocol.messages import Stats
from outrider.server.answers.choices import UNFINISHED, AnswerPlan, ChoiceState, StreamItem
from outrider.server.answers.formatter import AnswerFormatter
from outrider.server.connection import chunk_writer
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.middleware import get_api_key
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.problems import Problem, to_problem

FIRST_RESULT_SECONDS = 2.0
"""How long a stream waits for its first result before its status 200 is sent; earlier errors have their own status."""
KEEP_ALIVE_SECONDS = 4.0
"""A stream sends a keep-alive after this long without a result."""

log = logging.getLogger(__name__)
T = TypeVar("T")
RESPONSE_END = {"type": "http.response.body", "body": b"", "more_body": False}


def identify_caller(request: Request) -> str:
    """Returns the caller's API key, or its address if it sends none."""
    return get_api_key(request.scope) or (request.client.host if request.client is not None else "")


class CompletionBackend(Protocol):
    """A backend that completes texts: one orchestrator, or a fleet."""

    def client(self, request: Request) -> AsyncBaseClient:
        """Returns the client to use for `request`."""

    async def stats(self) -> Stats:
        """Returns current statistics. Raises OutriderError if there is no answer."""


class OrchestratorClient(AsyncClient):
    """A client of one orchestrator, which all callers share. The orchestrator takes turns by their names."""

    def client(self, request: Request) -> Self:
        return self


@dataclass(eq=False, slots=True)
class ServerContext:
    """The state of one application, in `app.state.context`.

    `ignored`: unknown fields of requests. `running`: the number of each caller's choices.
    """

    model: ServedModel
    backend: CompletionBackend
    metrics: Metrics
    settings: HttpSettings
    ignored: set[str] = field(default_factory=set)
    draining: bool = False
    running: Counter[str] = field(default_factory=Counter)

    def check_model(self, name: str | None) -> None:
        """Raises Problem for the name of another model."""
        if name is not None and {name, name.rstrip("/")}.isdisjoint(self.model.names):
            known = ", ".join(self.model.names)
            raise Problem(
                f"the model {name[:200]!r} is not served here; expected {known}", "model", 404, "model_not_found"
            )

    async def count_tokens(self, source: TemplateInput) -> int:
        """Counts the tokens of a conversation. Raises like `ServedModel.tokenize_conversation`."""
        return len((await asyncio.to_thread(self.model.tokenize_conversation, source)).tokens)

    async def respond(self, request: Request, formatter: AnswerFormatter, stream: bool | None) -> BaseModel | Response:
        """Generates the answers, and returns the response or the stream.

        Raises:
            Problem: the server is draining, or the caller has too many requests.
            OutriderError: a choice failed; of a stream, before its status 200 was sent.
            ClientDisconnect: the client left; the request is cancelled.
        """
        if self.draining:
            raise Problem("the server is shutting down; retry after it restarts", status=503)
        plan, caller, most = formatter.plan, identify_caller(request), self.settings.max_streams_per_key
        running, more = self.running[caller], len(plan.choices)
        if most is not None and more > most:
            raise Problem(f"this request asks for {more} answers; expected at most {most} (--max-streams-per-key)")
        if most is not None and running + more > most:
            raise ServerBusy(
                f"this request asks for {more} while you have {running} running; expected at most {most} answers at"
                " once (--max-streams-per-key); try again later"
            )
        run = RequestRun(self, request, plan)
        if stream:
            return EventStream(run, formatter)
        try:
            await run_while_connected(run.finish(), request.receive)
        finally:
            await run.close()
        return formatter.format_response()


async def _get_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


ContextDependency = Annotated[ServerContext, Depends(_get_context)]


class RequestRun:
    """Runs from its creation on. Call `next` until `is_done`, then `close`, which cancels the rest.

    A choice ends with an error after the server's time limit, or the request's own timeout.
    """

    def __init__(self, context: ServerContext, request: Request, plan: AnswerPlan) -> None:
        self._context, self._choices, self._caller = context, plan.choices, identify_caller(request)
        context.running[self._caller] += len(plan.choices)
        self._client = context.backend.client(request)
        name = hashlib.sha256(self._caller.encode()).hexdigest()[:16]  # a key must not reach another machine
        self._options = {**plan.speculation, "client": name}
        limits = (plan.timeout, context.settings.request_timeout)
        self._timeout = min((limit for limit in limits if limit is not None), default=None)
        self._start_timer = partial(ChoiceTimer, context.metrics, request.scope["state"]["span"], plan.is_chat)
        self._queue = asyncio.Queue[StreamItem | Exception]()
        self._streams: dict[int, AsyncStream] = {}
        self._tasks = [asyncio.create_task(self._run_choice(choice)) for choice in plan.choices]

    @property
    def is_done(self) -> bool:
        """Whether all choices are complete and their results were returned."""
        return self._queue.empty() and all(choice.result is not UNFINISHED for choice in self._choices)

    async def finish(self) -> None:
        """Waits until all choices are complete.

        Raises:
            OutriderError: one failed.
        """
        while not self.is_done:
            await self.next()

    async def next(self) -> list[StreamItem]:
        """Waits for new items like `poll`, and returns a keep-alive if there are none for a while."""
        return await self.poll(KEEP_ALIVE_SECONDS) or ["still here"]

    async def poll(self, max_seconds: float) -> list[StreamItem]:
        """Waits for new items, at most `max_seconds`, and returns them in order.

        Raises:
            OutriderError: a choice failed, which fails the request.
        """
        try:
            async with asyncio.timeout(max_seconds):
                ready = [await self._queue.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            ready.append(self._queue.get_nowait())
        for index in [index for index in self._streams if self._choices[index].finish == "tool"]:
            await self._streams.pop(index).end()  # its result follows
        found = []
        for one in ready:
            if isinstance(one, Exception):
                raise one
            found.append(one)
        return found

    async def close(self) -> None:
        """Cancels unfinished choices, and waits until they are cancelled."""
        self._context.running -= Counter({self._caller: len(self._choices)})  # without callers that have none left
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_choice(self, choice: ChoiceState) -> None:
        timer = self._start_timer(choice.index, choice.sampling)
        result: GenerationResult | None = None
        failed: Exception | None = None

        def put(items: Sequence[StreamItem]) -> None:
            for item in items:
                self._queue.put_nowait(item)

        def add_chunk(chunk: Chunk) -> None:
            timer.record_tokens(len(chunk.token_ids))
            put(choice.add(chunk))

        try:
            stream = self._streams[choice.index] = self._client.stream(
                choice.prompt.tokens,
                choice.sampling,
                **self._options,
                progress=lambda done, total: self._queue.put_nowait(f"prompt {done}/{total}"),
            )
            log.info("choice %d is %s", choice.index, stream.request, extra={"client_request": stream.request})
            async with asyncio.timeout(self._timeout):
                result = await stream.follow(add_chunk)
            put(choice.end(result))
        except TimeoutError:
            late = (
                f"the answer was not complete after {self._timeout:g} s and was cancelled; set a longer timeout, at"
                " most the server's --request-timeout"
            )
            self._queue.put_nowait(failed := Problem(late, "timeout", 504, "timeout"))
        except Exception as error:
            self._queue.put_nowait(failed := error)
            raise  # `close` gathers it
        finally:
            self._streams.pop(choice.index, None)
            timer.finish(result, failed)


class EventStream(Response):
    """A response that writes the items of `run`, server-sent events formatted by `events`, and closes `run` at its end,
    or when its client disconnects. A stream that fails after its start reports the error in an event of its API."""

    media_type = "text/event-stream"

    def __init__(self, run: RequestRun, events: AnswerFormatter) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            items = await run_while_connected(self._run.poll(FIRST_RESULT_SECONDS), receive)
            with suppress(ClientDisconnect):
                await run_while_connected(self._write(items, chunk_writer(scope, send), send), receive)
        finally:
            await self._run.close()

    async def _write(self, items: list[StreamItem], write: Callable[[bytes], Awaitable[None]], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await write(self._events.begin())
            while True:
                for one in items:
                    await write(self._events.format_item(one))
                if self._run.is_done:
                    break
                items = await self._run.next()
            await write(self._events.end())
        except Exception as error:
            await write(self._events.format_error(to_problem(error)))
            await send(RESPONSE_END)
            if isinstance(error, OutriderError):
                return
            raise
        await send(RESPONSE_END)


async def run_while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Returns the result of `work`.

    Raises:
        ClientDisconnect: the client left; `work` is cancelled.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await run_unless(disconnect(), ClientDisconnect(), work)


async def run_unless(event: Coroutine[Any, Any, None], error: Exception, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If `event` ends first, cancels `work` and raises `error`."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
