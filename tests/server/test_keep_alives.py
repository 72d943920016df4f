"""A stream without news sends keep-alives, in a form that each API's clients ignore."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.orchestrator.client.dialogue import Chunk
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.errors import EndpointError, OutriderError, ServerBusy, WorkerError
from outrider.protocol.sampling import SamplingParams
from outrider.server import server_context
from outrider.server.answers.choices import ChoiceState, Splitter, StreamItem
from outrider.server.answers.formatter import AnswerFormatter, AnswerPlan
from outrider.server.endpoints import chat, completions, messages
from outrider.server.metrics import Metrics
from outrider.server.model.served import TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import find_tool_format
from outrider.server.problems import to_problem
from outrider.server.server_context import RequestRun


class SilentRun(RequestRun):
    """A run that reports the progress of its prompt and is silent in between."""

    is_done = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self._streams = {}
        self._queue = asyncio.Queue()
        self._queue.put_nowait("prompt 512/4096")

    async def next(self) -> list[StreamItem]:
        found = await super().next()
        self.is_done = found == ["prompt 4096/4096"]
        if found == ["still here"]:
            self._queue.put_nowait("prompt 4096/4096")
        return found


MODEL: Any = SimpleNamespace(id="m", codec=load_codec(find_model(str(TINY_TARGET), weights=False)), thinking=None)
CHOICE = ChoiceState(0, TokenizedPrompt(()), SamplingParams(), Splitter())
PLAN = AnswerPlan(MODEL, 5, [CHOICE])
APIS: dict[str, AnswerFormatter] = {
    "chat": chat.ChatFormatter(PLAN, chat.ChatRequest.model_validate({"messages": [{"role": "user"}]})),
    "completions": completions.TextCompletionFormatter(PLAN, completions.CompletionRequest(prompt="x"), [""]),
}


def written_output(events: AnswerFormatter) -> list[bytes]:
    """Returns everything that is written for a `SilentRun`."""

    async def read() -> list[bytes]:
        silent_run, found = SilentRun(), list[bytes]()
        while not silent_run.is_done:
            found += map(events.format_item, await silent_run.next())
        return found

    return asyncio.run(read())


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_context, "KEEP_ALIVE_SECONDS", 0.01)


@pytest.mark.parametrize("api", APIS)
def test_silent_stream_sends_progress_and_keep_alive_comments(api: str) -> None:
    assert written_output(APIS[api]) == [b": prompt 512/4096\n\n", b": still here\n\n", b": prompt 4096/4096\n\n"]


def test_silent_messages_stream_sends_pings() -> None:
    assert written_output(messages.MessageFormatter(PLAN)) == [b'event: ping\ndata: {"type":"ping"}\n\n'] * 3


class UnfinishedCallStream:
    """Sends the beginning of a tool call and nothing after it."""

    request = "q"

    async def follow(self, grown: Callable[[Chunk], object]) -> None:
        grown(Chunk('<tool_call>\n{"name": "f", "argu', (1, 2, 3)))
        await asyncio.Event().wait()


def test_stream_whose_text_is_held_back_sends_keep_alives() -> None:
    client = SimpleNamespace(stream=lambda *_prompt, **_options: UnfinishedCallStream())
    backend, settings = SimpleNamespace(client=lambda _request: client), SimpleNamespace(request_timeout=None)
    context = SimpleNamespace(running=Counter(), backend=backend, settings=settings, metrics=Metrics("m", 10))
    request = SimpleNamespace(scope={"headers": [], "state": {"span": None}}, client=None)
    box = Toolbox(({"type": "function", "function": {"name": "f", "parameters": {}}},))

    async def first() -> list[StreamItem]:
        splitter = Splitter(None, find_tool_format(None, (), "json_tools"), box)
        plan = AnswerPlan(MODEL, 5, [ChoiceState(0, TokenizedPrompt(()), SamplingParams(), splitter)])
        run = RequestRun(context, request, plan)
        try:
            return await run.next()
        finally:
            await run.close()

    assert asyncio.run(first()) == ["still here"]


@pytest.mark.parametrize(
    ("error", "status"), [(ServerBusy("x"), 429), (EndpointError("x"), 503), (WorkerError("x"), 503)]
)
def test_errors_of_a_busy_server_have_retry_after(error: OutriderError, status: int) -> None:
    problem = to_problem(error)
    assert problem.status == status and int(problem.headers["retry-after"]) > 0
