"""What endpoints share: the model, the backend, metrics, and running requests until they end or the client leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.orchestrator.http_settings import HttpSettings
from outrider.server.answers.formatter import AnswerFormatter, AnswerPlan
from outrider.server.answers.parts import ChoiceJob, job, splitter
from outrider.server.answers.run import EventStream, RequestRun, while_connected
from outrider.server.answers.usage import counter, schema_checker, speller
from outrider.server.auth_middleware import CompletionBackend, caller_hash, caller_of
from outrider.server.endpoints.json_route import IgnoredFields
from outrider.server.mapping.generation_params import room, sampling_params
from outrider.server.mapping.output_format import OutputFormat, answer_grammar, resolve_output_format
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.problems import Refused
from outrider.server.schemas import Generation

FIRST_SECONDS = 0.5
"""How long a stream waits for its first result before its status 200 is sent."""


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
        most = room(self.model, len(prompt.tokens), max_tokens)
        sampling = sampling_params(self.model, asked, most, stop, grammar, logprobs)
        jobs = []
        for index in range(count):
            split = splitter(self.model, prompt, box, form is not None, grammar is not None)
            jobs.append(job(self.model.codec, asked, prompt.tokens, sampling, index, split))
        return AnswerPlan(
            self.model.id,
            len(prompt.tokens),
            jobs,
            box.one,
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

        def watch(index: int, job: ChoiceJob) -> ChoiceTimer:
            inner = span.choice(operation, index, job.sampling) if span is not None else None
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
