"""The state that endpoints share, and how they run requests until these end or the client disconnects.

A caller is identified by API key, or by address if it sends none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Protocol

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient
from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import ServerBusy
from outrider.protocol.messages import Stats
from outrider.server.answers.formatter import AnswerFormatter
from outrider.server.answers.run import EventStream, RequestRun, run_while_connected
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.middleware import get_api_key
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.problems import Problem

MAX_CLIENTS = 1024
ORCHESTRATOR_TIMEOUT_SECONDS = 10.0


def identify_caller(request: Request) -> str:
    """Returns the caller's API key, or its address if it sends none."""
    return get_api_key(request.scope) or (request.client.host if request.client is not None else "")


class CompletionBackend(Protocol):
    """A backend that completes texts: one orchestrator, or a fleet."""

    def client(self, request: Request) -> AsyncBaseClient:
        """Returns the client to use for `request`."""

    async def stats(self) -> Stats:
        """Returns current statistics. Raises OutriderError if there is no answer."""


class CallerClients:
    """Keeps one orchestrator client per caller, because the orchestrator limits the rate of each client's messages. The
    least recently used is dropped."""

    def __init__(self, endpoint: str) -> None:
        self._client_of = lru_cache(MAX_CLIENTS)(lambda caller: AsyncClient(endpoint, ORCHESTRATOR_TIMEOUT_SECONDS))
        self._stats_client = AsyncClient(endpoint, ORCHESTRATOR_TIMEOUT_SECONDS)

    def client(self, request: Request) -> AsyncClient:
        return self._client_of(identify_caller(request))

    async def stats(self) -> Stats:
        return await self._stats_client.stats()


@dataclass(eq=False, slots=True)
class ServerContext:
    """The state of one application, in `app.state.context`. `ignored`: unknown fields of requests."""

    model: ServedModel
    backend: CompletionBackend
    metrics: Metrics
    settings: HttpSettings
    ignored: set[str] = field(default_factory=set)
    draining: bool = False
    _running: Counter[str] = field(default_factory=Counter, init=False)

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
        running, more = self._running[caller], len(plan.choices)
        if most is not None and more > most:
            raise Problem(f"this request asks for {more} answers; expected at most {most} (--max-streams-per-key)")
        if most is not None and running + more > most:
            raise ServerBusy(
                f"this request asks for {more} while you have {running} running; expected at most {most} answers at"
                " once (--max-streams-per-key); try again later"
            )
        self._running[caller] += more
        start_timer = partial(ChoiceTimer, self.metrics, request.scope["state"]["span"], plan.is_chat)
        client, release = self.backend.client(request), partial(self._release, caller, more)
        name = hashlib.sha256(caller.encode()).hexdigest()[:16]  # a key must not reach another machine
        run = RequestRun(client, plan, start_timer, release, self.settings.request_timeout, name)
        if stream:
            return EventStream(run, formatter)
        try:
            await run_while_connected(run.finish(), request.receive)
        finally:
            await run.close()
        return formatter.format_response()

    def _release(self, caller: str, answers: int) -> None:
        self._running -= Counter({caller: answers})  # without callers that have none left


async def _get_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


ContextDependency = Annotated[ServerContext, Depends(_get_context)]
