"""A text continues at the same token on the next server at its endpoint; cores are scripted."""

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
from tests.orchestrator.stand import JOIN_SECONDS, Play, Stand

TEXT = "def héllo(x):\n    return '你好' + x\n"
Make = Callable[..., Stand]


def continues_text(codec: TextCodec, until: int | None = None, text: str = TEXT) -> Play:
    """A core that says the text behind what was said of it before, token by token; all of it, or so much of it."""
    tokens = codec.encode(text, special=False)

    def play(admit: Admit) -> list[ToFront]:
        new = [Committed(admit.request, (token,)) for token in tokens[len(admit.resume_tokens) : until]]
        ended = RequestEnded(admit.request, "length", Timings(predicted_n=len(new)))
        return [RequestBegan(admit.request, "ssd"), *new, *([ended] if until is None else [])]

    return play


def stop_abruptly(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends it without a word to its clients, as SIGKILL does."""
    monkeypatch.setattr(stand.front, "_fail_all", lambda *_: None)
    stand.stop()


class Reader(threading.Thread):
    """Reads a text; `begun` once the first server has said all that it says."""

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


@pytest.mark.parametrize("in_order", [True, False])
def test_text_continues_after_the_received_tokens(
    make_stand: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    tokens = codec.encode(TEXT, special=False)
    first = make_stand().start()
    first.core.play = continues_text(codec, 5)
    reader = read(Client(first.endpoint, reconnect=True))
    if in_order:
        first.stop()
    else:
        stop_abruptly(first, monkeypatch)
    second = make_stand()
    second.core.play = continues_text(codec)
    second.start()
    reader.join(JOIN_SECONDS)
    assert reader.result is not None
    assert (reader.result.text, reader.result.token_ids) == (TEXT, tokens)
    before, after = first.core.wait_for(Admit)[0], second.core.wait_for(Admit)[0]
    assert isinstance(before, Admit) and isinstance(after, Admit)
    assert (before.resume_tokens, after.resume_tokens) == ((), tokens[:5])
    assert (after.tokens, after.sampling) == (before.tokens, before.sampling)
    assert reader.result.timings.predicted_n == len(tokens) - 5


def test_async_client_continues_on_the_next_server(make_stand: Make, codec: TextCodec) -> None:
    first = make_stand().start()
    first.core.play = continues_text(codec, 5)

    async def run() -> str:
        stream, seen, second = AsyncClient(first.endpoint, reconnect=True).stream("x"), 0, None
        async for chunk in stream:
            seen += len(chunk.token_ids)
            if seen >= 5 and second is None:
                await asyncio.to_thread(first.stop)
                second = make_stand()
                second.core.play = continues_text(codec)
                second.start()
        return stream.result.text

    assert asyncio.run(run()) == TEXT


@pytest.mark.parametrize("how", ["close", "end"])
def test_async_stream_stops_while_its_client_looks_for_a_server(
    make_stand: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    retries, retry = list[Exception](), Dialogue.retry

    def retry_soon(self: Dialogue, error: Exception) -> float:
        retries.append(error)
        return min(retry(self, error), 0.05)

    monkeypatch.setattr(Dialogue, "retry", retry_soon)
    first = make_stand().start()
    first.core.play = continues_text(codec, 5)

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
        second = make_stand()
        second.core.play = continues_text(codec, 7)  # it goes on until it is cancelled
        second.start()
        await asyncio.wait_for(reading, JOIN_SECONDS)
        assert how == "end" or not second.core.told
        return seen

    assert len(asyncio.run(run())) <= 7


@pytest.mark.parametrize("in_order", [True, False])
def test_client_without_reconnect_raises_when_its_server_ends(
    make_stand: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    first = make_stand().start()
    first.core.play = continues_text(codec, 5)
    reader = read(Client(first.endpoint))
    if in_order:
        first.stop()
    else:
        stop_abruptly(first, monkeypatch)
    second = make_stand().start()
    reader.join(JOIN_SECONDS)
    assert isinstance(reader.error, ServerStopped | EndpointError)
    assert second.core.told == []


def test_reconnect_does_not_wait_for_a_server_never_reached(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="no server at"):
        Client(endpoint, reconnect=True).generate("x")


def test_reconnect_raises_when_no_server_returns(
    make_stand: Make, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.orchestrator.client.dialogue.RECONNECT_SECONDS", 0.5)
    first = make_stand().start()
    first.core.play = continues_text(codec, 5)
    reader = read(Client(first.endpoint, reconnect=True))
    first.stop()
    reader.join(JOIN_SECONDS)
    assert isinstance(reader.error, EndpointError)


# --- at the front -------------------------------------------------------------------------------------------------


def answered(stand: Stand, said: Sequence[int], seed: int | None = 1, **changes: Any) -> GenerationResult:
    """The answer to somebody who has received these tokens of the text."""
    stream = Client(stand.endpoint).stream("x", SamplingParams(seed=seed, **changes))
    dialogue = stream._dialogue
    dialogue.first_message = replace(dialogue.first_message, resume_tokens=np.asarray(said, np.int32))
    for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("count", range(0, 12))
def test_resumed_stream_sends_only_new_text_at_any_cut(stand: Stand, codec: TextCodec, count: int) -> None:
    tokens = codec.encode(TEXT, special=False)
    whole = TextStream(codec.spelling, codec.encode("x"), (), frozenset())
    stand.core.play = continues_text(codec)
    before, result = whole.feed(tokens[:count]).text, answered(stand, tokens[:count])
    assert (before + result.text, result.token_ids) == (TEXT, tokens[count:])


def test_stop_string_is_found_across_the_resume_point(stand: Stand, codec: TextCodec) -> None:
    stand.core.play = continues_text(codec)
    whole = Client(stand.endpoint).generate("x", SamplingParams(seed=1, stop=("turn '",)))
    result = answered(stand, whole.token_ids[:-1], stop=("turn '",))
    assert (result.finish_reason, result.token_ids) == ("stop", whole.token_ids[-1:])


@pytest.mark.parametrize(
    ("changes", "last", "reason"),
    [({"stop": ("return",)}, (), "stop"), ({"max_tokens": 12}, (), "length"), ({}, (0,), "eos")],
    ids=["stop", "length", "eos"],
)
def test_complete_text_ends_at_once_without_work(
    stand: Stand, codec: TextCodec, changes: dict[str, Any], last: tuple[int, ...], reason: str
) -> None:
    result = answered(stand, codec.encode(TEXT, special=False)[:12] + last, **changes)
    assert (result.finish_reason, result.token_ids, result.timings.predicted_n) == (reason, (), 0)
    assert stand.core.told == [] and Client(stand.endpoint).stats().active == 0


def test_resuming_requires_a_seed_and_valid_tokens(stand: Stand) -> None:
    with pytest.raises(InvalidRequest, match="the text so far has token 5000; expected ids from 0 to 4095"):
        answered(stand, [1, 5000])
    with pytest.raises(InvalidRequest, match="has no seed"):
        answered(stand, [1], seed=None)
