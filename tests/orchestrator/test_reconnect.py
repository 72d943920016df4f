"""A text continues at the same token on the next server at its endpoint. Servers are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.dialogue import Dialogue, GenerationResult
from outrider.orchestrator.events import Admit, Committed, RequestBegan, RequestEnded, ToFront
from outrider.orchestrator.pairing.detokenizer import TextStream
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.errors import EndpointError, InvalidRequest, ServerStopped
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams
from tests.orchestrator.scripted_server import JOIN_SECONDS, OnAdmit, ScriptedServer

TEXT = "def héllo(x):\n    return '你好' + x\n"
Make = Callable[..., ScriptedServer]


def continues_text(codec: TextCodec, until: int | None = None, text: str = TEXT) -> OnAdmit:
    """Returns an `on_admit` that commits the text after the resumed tokens: to its end, or up to token `until`."""
    tokens = codec.encode(text, special=False)

    def on_admit(admit: Admit) -> list[ToFront]:
        new = [Committed(admit.request, (token,)) for token in tokens[len(admit.resume_tokens) : until]]
        ended = RequestEnded(admit.request, "length", Timings(predicted_n=len(new)))
        return [RequestBegan(admit.request, "ssd"), *new, *([ended] if until is None else [])]

    return on_admit


def stop_abruptly(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the server without a message to its clients, as SIGKILL does."""
    monkeypatch.setattr(server.front, "_fail_all", lambda *_: None)
    server.stop()


class Reader(threading.Thread):
    """Reads a text in a thread. `begun` is set once `tokens` tokens have arrived."""

    def __init__(self, client: Client, sampling: SamplingParams, tokens: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.result: GenerationResult | None = None
        self.error: Exception | None = None
        self._stream, self._tokens = client.stream("x", sampling), tokens

    def run(self) -> None:
        seen = 0
        try:
            for chunk in self._stream:
                seen += len(chunk.token_ids)
                if seen >= self._tokens:
                    self.begun.set()
            self.result = self._stream.result
        except (EndpointError, ServerStopped) as error:
            self.error = error


def read(client: Client, tokens: int = 5, sampling: SamplingParams | None = None) -> Reader:
    reader = Reader(client, sampling or SamplingParams(max_tokens=64, temp=0.8), tokens)
    reader.start()
    assert reader.begun.wait(JOIN_SECONDS)
    return reader


@pytest.mark.parametrize("graceful", [True, False])
def test_text_continues_after_the_received_tokens(
    make_server: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, graceful: bool
) -> None:
    tokens = codec.encode(TEXT, special=False)
    first = make_server().start()
    first.core.on_admit = continues_text(codec, 5)
    reader = read(Client(first.endpoint, reconnect=True))
    if graceful:
        first.stop()
    else:
        stop_abruptly(first, monkeypatch)
    second = make_server()
    second.core.on_admit = continues_text(codec)
    second.start()
    reader.join(JOIN_SECONDS)
    assert reader.result is not None
    assert (reader.result.text, reader.result.token_ids) == (TEXT, tokens)
    before, after = first.core.wait_for(Admit)[0], second.core.wait_for(Admit)[0]
    assert isinstance(before, Admit) and isinstance(after, Admit)
    assert (before.resume_tokens, after.resume_tokens) == ((), tokens[:5])
    assert (after.tokens, after.sampling) == (before.tokens, before.sampling)
    assert reader.result.timings.predicted_n == len(tokens) - 5


def test_async_client_continues_on_the_next_server(make_server: Make, codec: TextCodec) -> None:
    first = make_server().start()
    first.core.on_admit = continues_text(codec, 5)

    async def run() -> str:
        stream, seen, second = AsyncClient(first.endpoint, reconnect=True).stream("x"), 0, None
        async for chunk in stream:
            seen += len(chunk.token_ids)
            if seen >= 5 and second is None:
                await asyncio.to_thread(first.stop)
                second = make_server()
                second.core.on_admit = continues_text(codec)
                second.start()
        return stream.result.text

    assert asyncio.run(run()) == TEXT


@pytest.mark.parametrize("how", ["close", "end"])
def test_async_stream_stops_while_its_client_looks_for_a_server(
    make_server: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    retries, retry = list[Exception](), Dialogue.retry

    def retry_soon(self: Dialogue, error: Exception) -> float:
        retries.append(error)
        return min(retry(self, error), 0.05)

    monkeypatch.setattr(Dialogue, "retry", retry_soon)
    first = make_server().start()
    first.core.on_admit = continues_text(codec, 5)

    async def run() -> list[int]:
        stream, seen = AsyncClient(first.endpoint, reconnect=True).stream("x"), list[int]()

        async def read() -> None:
            async for chunk in stream:
                seen.extend(chunk.token_ids)

        reading = asyncio.create_task(read())
        while len(seen) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(first.stop)
        while len(retries) < 2:
            await asyncio.sleep(0.01)
        await getattr(stream, how)()
        second = make_server()
        second.core.on_admit = continues_text(codec, 7)  # the request continues until it is cancelled
        second.start()
        await asyncio.wait_for(reading, JOIN_SECONDS)
        assert how == "end" or not second.core.received
        return seen

    assert len(asyncio.run(run())) <= 7


@pytest.mark.parametrize("graceful", [True, False])
def test_client_without_reconnect_raises_when_its_server_ends(
    make_server: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, graceful: bool
) -> None:
    first = make_server().start()
    first.core.on_admit = continues_text(codec, 5)
    reader = read(Client(first.endpoint))
    if graceful:
        first.stop()
    else:
        stop_abruptly(first, monkeypatch)
    second = make_server().start()
    reader.join(JOIN_SECONDS)
    assert isinstance(reader.error, ServerStopped | EndpointError)
    assert second.core.received == []


def test_reconnect_does_not_wait_for_a_server_never_reached(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="no server at"):
        Client(endpoint, reconnect=True).generate("x")


def test_reconnect_raises_when_no_server_returns(
    make_server: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.orchestrator.client.dialogue.RECONNECT_SECONDS", 0.5)
    first = make_server().start()
    first.core.on_admit = continues_text(codec, 5)
    reader = read(Client(first.endpoint, reconnect=True))
    first.stop()
    reader.join(JOIN_SECONDS)
    assert isinstance(reader.error, EndpointError)


# --- at the front -------------------------------------------------------------------------------------------------


def resume(server: ScriptedServer, received: Sequence[int], seed: int | None = 1, **changes: Any) -> GenerationResult:
    """Returns the answer to a client that has already received these tokens."""
    stream = Client(server.endpoint).stream("x", SamplingParams(seed=seed, **changes))
    dialogue = stream._dialogue
    dialogue.first_message = replace(dialogue.first_message, resume_tokens=np.asarray(received, np.int32))
    for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("count", range(0, 12))
def test_resumed_stream_sends_only_new_text_at_any_cut(server: ScriptedServer, codec: TextCodec, count: int) -> None:
    tokens = codec.encode(TEXT, special=False)
    whole = TextStream(codec.spelling, codec.encode("x"), (), frozenset())
    server.core.on_admit = continues_text(codec)
    before, result = whole.feed(tokens[:count]).text, resume(server, tokens[:count])
    assert (before + result.text, result.token_ids) == (TEXT, tokens[count:])


def test_stop_string_is_found_across_the_resume_point(server: ScriptedServer, codec: TextCodec) -> None:
    server.core.on_admit = continues_text(codec)
    whole = Client(server.endpoint).generate("x", SamplingParams(seed=1, stop=("turn '",)))
    result = resume(server, whole.token_ids[:-1], stop=("turn '",))
    assert (result.finish_reason, result.token_ids) == ("stop", whole.token_ids[-1:])


@pytest.mark.parametrize(
    ("changes", "last", "reason"),
    [({"stop": ("return",)}, (), "stop"), ({"max_tokens": 12}, (), "length"), ({}, (0,), "eos")],
    ids=["stop", "length", "eos"],
)
def test_complete_text_ends_at_once_without_work(
    server: ScriptedServer, codec: TextCodec, changes: dict[str, Any], last: tuple[int, ...], reason: str
) -> None:
    result = resume(server, codec.encode(TEXT, special=False)[:12] + last, **changes)
    assert (result.finish_reason, result.token_ids, result.timings.predicted_n) == (reason, (), 0)
    assert server.core.received == [] and Client(server.endpoint).stats().active == 0


def test_resuming_requires_a_seed_and_valid_tokens(server: ScriptedServer) -> None:
    with pytest.raises(InvalidRequest, match="the text so far has token 5000; expected ids from 0 to 4095"):
        resume(server, [1, 5000])
    with pytest.raises(InvalidRequest, match="has no seed"):
        resume(server, [1], seed=None)
