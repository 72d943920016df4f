"""What endpoints share: the model, the backend, metrics, and running requests until they end or the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.sampling import Grammar
from outrider.server.answers.parts import ChoiceState, Splitter, whole
from outrider.server.answers.run import ChoiceJob, RequestRun
from outrider.server.answers.sse import wait_for_disconnect
from outrider.server.auth_middleware import ClientDisconnected, CompletionBackend, StreamLimiter, caller_hash, caller_of
from outrider.server.endpoints.json_route import IgnoredFields
from outrider.server.mapping.conversation import Toolbox
from outrider.server.mapping.output_format import OutputFormat, answer_grammar, resolve_output_format
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.model.served import ServedModel, TemplateInput, TokenizedPrompt
from outrider.server.problems import Refused

NO_TOOLS = Toolbox()
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
        self._stream_limiter = StreamLimiter(settings.max_streams_per_key)
        self._longest = settings.request_timeout
        self.ignored = IgnoredFields()
        self.draining = False

    def check_model(self, name: str | None) -> None:
        """Raises Refused for the name of another model."""
        if name is not None and name not in self.model.names:
            known = ", ".join(self.model.names)
            raise Refused(
                f"the model {name[:200]!r} is not served here; expected {known}", "model", 404, "model_not_found"
            )

    async def prompt(self, talk: TemplateInput) -> TokenizedPrompt:
        """Tokenizes a conversation, in a thread because a long one would block the event loop."""
        return await asyncio.to_thread(self.model.prompt, talk)

    async def plain(self, text: str) -> TokenizedPrompt:
        """Tokenizes a text, in a thread."""
        return await asyncio.to_thread(self.model.plain, text)

    async def form(self, form: OutputFormat | None) -> OutputFormat | None:
        """Decides whether a grammar can enforce all of `form`; if so, it is no longer `loose`. Runs in a thread."""
        return (
            await asyncio.to_thread(resolve_output_format, self.model, form)
            if form is not None and form.loose
            else form
        )

    async def grammar(
        self, prompt: TokenizedPrompt, form: OutputFormat | None, box: Toolbox = NO_TOOLS
    ) -> Grammar | None:
        """Compiles the grammar that constrains the answer, in a thread.

        Raises:
            Refused: it can't be compiled.
        """
        if form is None and not box.binds:
            return None
        return await asyncio.to_thread(answer_grammar, self.model, prompt, box, form)

    def begin(self, request: Request, jobs: Sequence[ChoiceJob]) -> RequestRun:
        """Submits the jobs. Raises Refused while the server is draining, and if the caller has too many requests."""
        if self.draining:
            raise Refused("the server is shutting down; retry after it restarts", status=503)
        caller = caller_of(request)
        place = self._stream_limiter.take(caller)
        span = request.scope["state"]["span"]
        operation = "text_completion" if request.url.path in ("/v1/completions", "/completions") else "chat"

        def watch(index: int, job: ChoiceJob) -> ChoiceTimer:
            inner = span.choice(operation, index, job.params.sampling) if span is not None else None
            return self.metrics.watch(inner)

        return RequestRun(self.backend.client(request), jobs, watch, place, self._longest, caller_hash(caller))

    async def streaming(self, request: Request, jobs: Sequence[ChoiceJob]) -> RequestRun:
        """Submits the jobs of a stream, and waits up to FIRST_SECONDS for the first result, so that early errors get
        their own HTTP status.

        Raises:
            OutriderError: the request failed by then.
        """
        run = self.begin(request, jobs)
        try:
            await run.begun(FIRST_SECONDS)
        except BaseException:
            await run.close()
            raise
        return run

    async def whole(
        self, request: Request, jobs: Sequence[ChoiceJob], splitters: Sequence[Splitter], one_call: bool = False
    ) -> list[ChoiceState]:
        """Submits the jobs and returns all finished choices.

        Raises:
            OutriderError: a choice failed.
            ClientDisconnected: the client left; the request is cancelled.
        """
        run = self.begin(request, jobs)
        reading = asyncio.create_task(whole(run, splitters, one_call))
        leaving = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnected
            return reading.result()
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)
            await run.close()


async def _server_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


TheServer = Annotated[ServerContext, Depends(_server_context)]


def as_json(shape: BaseModel) -> Response:
    """Returns a non-streamed response."""
    return Response(shape.model_dump_json(), media_type="application/json")
