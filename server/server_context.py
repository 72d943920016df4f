"""What endpoints share: the model, the backend, metrics, and running requests until they end or the client leaves.

A caller is identified by API key, or by address if it sends none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import Annotated, Protocol

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient
from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.messages import Stats
from outrider.server.answers.formatter import AnswerFormatter, AnswerPlan
from outrider.server.answers.parts import ChoiceState, new_choice, splitter
from outrider.server.answers.run import EventStream, RequestRun, while_connected
from outrider.server.answers.usage import counter, schema_checker, speller
from outrider.server.endpoints.json_route import IgnoredFields
from outrider.server.mapping.generation_params import (
    UNBOUNDED,
    OutputFormat,
    answer_grammar,
    resolve_output_format,
    sampling_params,
)
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.middleware import key_of
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.problems import Refused
from outrider.server.schemas import Generation

FIRST_SECONDS = 0.5
"""How long a stream waits for its first result before its status 200 is sent."""
MAX_CLIENTS = 1024
TIMEOUT_SECONDS = 10.0


def caller_of(request: Request) -> str:
    """Returns the caller's API key, or else its address."""
    return key_of(request.scope) or (request.client.host if request.client is not None else "")


def caller_hash(caller: str) -> str:
    """Returns a hash of the caller that does not reveal its key. The orchestrator may run on another machine."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16]


class CompletionBackend(Protocol):
    """What completes texts: one orchestrator, or a fleet."""

    def client(self, request: Request) -> AsyncBaseClient:
        """Returns the client to use for `request`."""

    async def stats(self) -> Stats:
        """Returns current statistics. Raises OutriderError if there is no answer."""


class CallerClients:
    """Keeps one orchestrator client per caller, because the orchestrator schedules fairly by client. The least recently
    used is dropped."""

    def __init__(self, endpoint: str) -> None:
        self._client_of = lru_cache(MAX_CLIENTS)(lambda caller: AsyncClient(endpoint, TIMEOUT_SECONDS))
        self._stats_client = AsyncClient(endpoint, TIMEOUT_SECONDS)

    def client(self, request: Request) -> AsyncClient:
        return self._client_of(caller_of(request))

    async def stats(self) -> Stats:
        return await self._stats_client.stats()


class ServerContext:
    """One per application, in `app.state.context`."""

    def __init__(
        self, model: ServedModel, backend: CompletionBackend, metrics: Metrics, settings: HttpSettings
    ) -> None:
        self.model = model
        self.backend = backend
        self.metrics = metrics
        self.settings = settings
        self._running = Counter[str]()
        self.ignored = IgnoredFields()
        self.draining = False

    def check_model(self, name: str | None) -> None:
        """Raises Refused for the name of another model."""
        if name is not None and name not in self.model.names:
            known = ", ".join(self.model.names)
            raise Refused(
                f"the model {name[:200]!r} is not served here; expected {known}", "model", 404, "model_not_found"
            )

    def plan(
        self,
        asked: Generation,
        talk: TemplateInput,
        form: OutputFormat | None,
        stop: str | Sequence[str] | None,
        max_tokens: int | None,
        logprobs: int | None = None,
        count: int = 1,
    ) -> AnswerPlan:
        """Prepares `count` answers to a conversation, which may take long: call it in a thread.

        `max_tokens` None: what the context has room for.

        Raises:
            Refused, InvalidRequest, ModelError: a value is out of range, the template rejects the conversation, or the
                format or the tools can't be enforced.
        """
        box, form = talk.box, resolve_output_format(self.model, form)
        prompt = self.model.prompt(talk)
        grammar = answer_grammar(self.model, prompt, box, form)
        if max_tokens is None:
            length = self.model.context_length
            max_tokens = UNBOUNDED if length is None else max(length - len(prompt.tokens), 1)
        sampling = sampling_params(self.model, asked, max_tokens, stop, grammar, logprobs)
        choices = []
        for index in range(count):
            split = splitter(self.model, prompt, box, form is not None, grammar is not None)
            choices.append(new_choice(self.model.codec, asked, prompt.tokens, sampling, index, split, box.one))
        return AnswerPlan(
            self.model.id,
            len(prompt.tokens),
            choices,
            counter(self.model, prompt),
            speller(self.model, sampling),
            schema_checker(form, box),
        )

    async def count_tokens(self, talk: TemplateInput) -> int:
        """Counts the tokens of a conversation. Raises as `plan`."""
        return len((await asyncio.to_thread(self.model.prompt, talk)).tokens)

    async def respond(self, request: Request, formatter: AnswerFormatter, stream: bool | None) -> Response:
        """Generates the answers, and returns the response or the stream.

        Raises:
            Refused: the server is draining, or the caller has too many requests.
            OutriderError: a choice failed; of a stream, before its status 200 was sent.
            ClientDisconnect: the client left; the request is cancelled.
        """
        if self.draining:
            raise Refused("the server is shutting down; retry after it restarts", status=503)
        caller, most = caller_of(request), self.settings.max_streams_per_key
        if most is not None and self._running[caller] >= most:
            raise Refused(
                f"{most} of your requests are running, the maximum (--max-streams-per-key); try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._running[caller] += 1
        span = request.scope["state"]["span"]
        operation = "text_completion" if request.url.path in ("/v1/completions", "/completions") else "chat"

        def watch(choice: ChoiceState) -> ChoiceTimer:
            inner = span.choice(operation, choice.index, choice.sampling) if span is not None else None
            return ChoiceTimer(self.metrics, inner)

        client, release = self.backend.client(request), partial(self._release, caller)
        longest, name = self.settings.request_timeout, caller_hash(caller)
        run = RequestRun(client, formatter.plan, watch, release, longest, name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(run.close)
            if stream:
                await run.begun(FIRST_SECONDS)  # early errors get their own HTTP status
                stack.pop_all()
                return EventStream(run, formatter)
            return as_json(formatter.whole(await while_connected(run.whole(), request.receive)))

    def _release(self, caller: str) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]


async def _server_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


TheServer = Annotated[ServerContext, Depends(_server_context)]


def as_json(shape: BaseModel) -> Response:
    """Returns a non-streamed response."""
    return Response(shape.model_dump_json(), media_type="application/json")
