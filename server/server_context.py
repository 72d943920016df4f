"""What every endpoint needs: the model, the way to the orchestrator, and answers that end when their reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.sampling import Grammar
from outrider.server.answers.part_stream import ChoiceState, whole
from outrider.server.answers.parts import Splitter
from outrider.server.answers.run import ChoiceJob, RequestRun
from outrider.server.answers.sse import gone
from outrider.server.auth_middleware import CompletionBackend, StreamLimiter, caller_of, pseudonym
from outrider.server.mapping.form import Form, held, settled
from outrider.server.mapping.speech import Toolbox
from outrider.server.mapping.unknown import IgnoredFields
from outrider.server.metrics import ChoiceTimer, Metrics
from outrider.server.model.served import ServedModel, TemplateInput, TokenizedPrompt
from outrider.server.problems import Refused

NO_TOOLS = Toolbox()
FIRST_SECONDS = 0.5
"""How long a stream's status waits for the first news: what is refused is refused with its own status until then."""


class ReaderGone(Exception):
    """Nobody waits for the answer any more."""


class ServerContext:
    """One server's; endpoints find it in the app's state."""

    def __init__(self, model: ServedModel, behind: CompletionBackend, metrics: Metrics, settings: HttpSettings) -> None:
        self.model = model
        self.backend = behind
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
        """The conversation's tokens. Off the loop's thread: a long one takes a while, and others have news to write."""
        return await asyncio.to_thread(self.model.prompt, talk)

    async def plain(self, text: str) -> TokenizedPrompt:
        """A text's tokens, the same way."""
        return await asyncio.to_thread(self.model.plain, text)

    async def form(self, form: Form | None) -> Form | None:
        """As it can be held: `loose` only where a grammar leaves something of it out. Off the loop's thread, too."""
        return await asyncio.to_thread(settled, self.model, form) if form is not None and form.loose else form

    async def grammar(self, prompt: TokenizedPrompt, form: Form | None, box: Toolbox = NO_TOOLS) -> Grammar | None:
        """What the answer to `prompt` is held to: off the loop's thread, for compiling may take a while.

        Raises:
            Refused: it can't be.
        """
        if form is None and not box.binds:
            return None
        return await asyncio.to_thread(held, self.model, prompt, box, form)

    def begin(self, request: Request, jobs: Sequence[ChoiceJob]) -> RequestRun:
        """Sends the jobs off. Raises Refused at the end of the day, and who has as many under way as may be."""
        if self.draining:
            raise Refused("the server is shutting down; retry after it restarts", status=503)
        caller = caller_of(request)
        place = self._stream_limiter.take(caller)
        span = request.scope["state"]["span"]
        operation = "text_completion" if request.url.path in ("/v1/completions", "/completions") else "chat"

        def watch(index: int, job: ChoiceJob) -> ChoiceTimer:
            inner = span.choice(operation, index, job.params.sampling) if span is not None else None
            return self.metrics.watch(inner)

        return RequestRun(self.backend.client(request), jobs, watch, place, self._longest, pseudonym(caller))

    async def streaming(self, request: Request, jobs: Sequence[ChoiceJob]) -> RequestRun:
        """The same for a stream: returns once it is worth its status.

        Raises:
            OutriderError: it was refused, or failed, before that.
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
        """All choices, finished.

        Raises:
            OutriderError: one failed.
            ReaderGone: whoever asked has left; what they asked for is cancelled.
        """
        run = self.begin(request, jobs)
        reading = asyncio.create_task(whole(run, splitters, one_call))
        leaving = asyncio.create_task(gone(request.receive))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ReaderGone
            return reading.result()
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)
            await run.close()


async def _server_context(request: Request) -> ServerContext:
    found: ServerContext = request.app.state.context
    return found


TheServer = Annotated[ServerContext, Depends(_server_context)]


def as_json(shape: BaseModel) -> Response:
    """A whole answer."""
    return Response(shape.model_dump_json(), media_type="application/json")
