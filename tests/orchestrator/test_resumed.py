"""A text that its server can't finish continues unchanged on the next of several; cores are scripted."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from outrider import AsyncClient, AsyncResumed, Client, Resumed
from outrider.orchestrator.cli import main
from outrider.orchestrator.client.async_client import AsyncBaseClient, ChunkHandler
from outrider.orchestrator.client.dialogue import Chunk, Dialogue, GenerationResult
from outrider.orchestrator.events import (
    Admit,
    Committed,
    RequestBegan,
    RequestEnded,
    ToFront,
    WorkersChanged,
)
from outrider.orchestrator.front.admission import FairQueue
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import (
    EndpointError,
    InvalidRequest,
    OtherModel,
    OutriderError,
    ServerBusy,
    WorkerError,
)
from outrider.protocol.messages import Done, Failed, Message, Timings
from outrider.protocol.sampling import SamplingParams
from tests.orchestrator.stand import Play, Stand, worker_stats

TEXT = "def héllo(x):\n    return '你好' + x\n"
SAMPLING = SamplingParams(max_tokens=64, temp=0.8)
GONE = "the target died too often"


def says(codec: TextCodec, tokens: int | None, kind: str = "ServerStopped") -> Play:
    """So many tokens more of the text, then the end of the server's wits; None: all of it."""
    text = codec.encode(TEXT, special=False)

    def play(admit: Admit) -> list[ToFront]:
        until = None if tokens is None else len(admit.resume_tokens) + tokens
        new: list[ToFront] = [Committed(admit.request, (token,)) for token in text[len(admit.resume_tokens) : until]]
        if until is None or until >= len(text):
            last: ToFront = RequestEnded(admit.request, "length", Timings(predicted_n=len(new)))
        else:
            last = Failed(admit.request, kind, GONE)
        return [RequestBegan(admit.request, "ssd"), *new, last]

    return play


@pytest.fixture
def stands(endpoint: str, codec: TextCodec) -> Iterator[Callable[..., list[Stand]]]:
    """`stands(2, None)`: running servers that say so many tokens each before they fail."""
    pair, running = choose_pair(ServeSettings()), list[Stand]()
    loaded = load_pair(pair)

    def make(*tokens: int | None, kind: str = "ServerStopped") -> list[Stand]:
        for count in tokens:
            running.append(Stand(pair, loaded, f"{endpoint}-{len(running)}"))
            running[-1].core.play = says(codec, count, kind)
            running[-1].start()
        return running[-len(tokens) :]

    yield make
    for stand in running:
        stand.stop()


def clients(stands: list[Stand]) -> list[Client]:
    return [stand.client() for stand in stands]


def test_text_is_complete_after_breaks_at_any_token(stands: Callable[..., list[Stand]], codec: TextCodec) -> None:
    tokens = codec.encode(TEXT, special=False)
    for first in range(len(tokens)):
        made = list(stands(first, first // 2, None))
        result = Resumed(clients(made)).generate("x", SAMPLING)
        assert (result.text, result.token_ids) == (TEXT, tokens)
        asked = [admit for stand in made for admit in stand.core.told if isinstance(admit, Admit)]
        assert [len(admit.resume_tokens) for admit in asked] == [0, first, first + first // 2][: len(asked)]
        assert len({admit.sampling.seed for admit in asked}) == 1 and asked[0].sampling.seed is not None
        for stand in made:
            stand.stop()


def test_async_resumed_completes_the_text(stands: Callable[..., list[Stand]]) -> None:
    async def run() -> str:
        return (await AsyncResumed([AsyncClient(s.endpoint) for s in stands(3, 0, 4, None)]).generate("x")).text

    assert asyncio.run(run()) == TEXT


def test_servers_take_turns_until_the_text_is_complete(stands: Callable[..., list[Stand]]) -> None:
    """And the one that answered last is asked first the next time."""
    made = stands(4, 5)
    both = Resumed(clients(made))
    assert both.generate("x", SAMPLING).text == TEXT
    assert both.generate("x", SAMPLING).text == TEXT
    told = [len([one for one in stand.core.told if isinstance(one, Admit)]) for stand in made]
    assert min(told) >= 2


def test_dead_server_is_skipped(stands: Callable[..., list[Stand]]) -> None:
    dead, alive = stands(None, None)
    asks = Resumed(clients([dead, alive]))
    dead.stop()
    assert asks.generate("x", SAMPLING).text == TEXT
    alive.stop()
    with pytest.raises(OutriderError, match="no server at"):
        asks.generate("x", SAMPLING)


def known_as(stand: Stand, fingerprint: str) -> None:
    workers = (replace(worker_stats("target"), fingerprint=fingerprint), worker_stats("draft"))
    stand.lines.events.put(WorkersChanged(workers))


def test_server_with_other_weights_is_skipped(stands: Callable[..., list[Stand]]) -> None:
    made = stands(4, None, None)
    for stand, fingerprint in zip(made, ("a", "b", "a"), strict=True):
        known_as(stand, fingerprint)
        while stand.admission.target_fingerprint != fingerprint:
            stand.client().stats()
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    assert [len([one for one in stand.core.told if isinstance(one, Admit)]) for stand in made] == [1, 0, 1]
    with pytest.raises(OtherModel, match="began with another model"):
        Resumed(clients(made[:2])).generate("x", SAMPLING)


def test_request_that_kills_workers_is_given_up_after_two_servers(stands: Callable[..., list[Stand]]) -> None:
    made = stands(2, 2, 2, 2, None, kind="WorkerError")
    with pytest.raises(WorkerError, match=GONE):
        Resumed(clients(made)).generate("x", SAMPLING)
    assert sum(isinstance(one, Admit) for stand in made for one in stand.core.told) == 2


def test_reconnecting_client_asks_again_after_one_worker_error(
    stands: Callable[..., list[Stand]], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.orchestrator.client.dialogue.RETRY_SECONDS", 0.0)
    (stand,) = stands(3, kind="WorkerError")
    with pytest.raises(WorkerError, match=GONE):
        Client(stand.endpoint, reconnect=True).generate("x", SAMPLING)
    assert [len(one.resume_tokens) for one in stand.core.told if isinstance(one, Admit)] == [0, 3]
    stand.core.play = says(codec, 3, "ServerBusy")
    assert Client(stand.endpoint, reconnect=True).generate("x", SAMPLING).text == TEXT


def test_busy_server_is_skipped(stands: Callable[..., list[Stand]]) -> None:
    made = stands(0, None, kind="ServerBusy")
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    with pytest.raises(ServerBusy):
        Resumed(clients(made[:1])).generate("x", SAMPLING)


def test_invalid_request_raises_and_servers_stay_usable(stands: Callable[..., list[Stand]]) -> None:
    made = stands(None, None)
    with pytest.raises(InvalidRequest, match="expected ids from 0"):
        Resumed(clients(made)).generate([10**6], SAMPLING)
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    with pytest.raises(InvalidRequest, match="needs at least one client"):
        Resumed([])


def test_resumed_request_goes_first_in_the_queue() -> None:
    queue = FairQueue[str]()
    for client, name in (((b"a",), "a1"), ((b"b",), "b1"), ((b"a",), "a2")):
        queue.put(client, name)
    queue.put((b"a",), "a0", first=True)
    queue.put((b"c",), "c0", first=True)
    assert [queue.take() for _ in range(len(queue))] == ["c0", "a0", "b1", "a1", "a2"]


def test_generate_command_continues_on_the_next_server(
    stands: Callable[..., list[Stand]], capsys: pytest.CaptureFixture[str]
) -> None:
    places = ",".join(stand.endpoint for stand in stands(3, None))
    assert main(["generate", "--connect", places, "-p", "x", "--temp", "0.8"]) == 0
    assert capsys.readouterr().out == f"{TEXT}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--connect", "ipc:///tmp/no/a,ipc:///tmp/no/b"], 4, "no server at ipc:///tmp/no/b"),
        (["--connect", "ipc:///tmp/no/a,,ipc:///tmp/no/b"], 2, "expected each server once"),
        (["--connect", "ipc:///tmp/no/a,ipc:///tmp/no/a"], 2, "expected each server once"),
        (["--connect", "ipc:///tmp/no/a,ipc:///tmp/no/b", "--server-key", "x"], 2, "`outrider keys trust` for each"),
    ],
)
def test_invalid_server_list_prints_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "x", *arguments]) == code
    said = capsys.readouterr()
    assert sentence in said.err and len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.parametrize("clients", [[], ["ipc:///tmp/a"], None, "ipc:///tmp/a", [AsyncClient("ipc:///tmp/a")]])
def test_resumed_needs_a_list_of_clients(clients: Any) -> None:
    with pytest.raises(InvalidRequest, match="client"):
        Resumed(clients)


def test_async_resumed_needs_async_clients() -> None:
    clients: list[Any] = [Client("ipc:///tmp/a")]
    with pytest.raises(InvalidRequest, match=r"such as \[AsyncClient\(A\), AsyncClient\(B\)\]"):
        AsyncResumed(clients)


# --- the end is lost ----------------------------------------------------------------------------------------------

LOST_ENDS = int(os.environ.get("OUTRIDER_LOST_ENDS", "60"))
LETTERS = ("ile with ", "def ", "é", "你", "好", "🙂", "x", "\n", "return ", "wi")


class Moved(AsyncBaseClient):
    """As a fleet asks: one engine, then the next."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        super().__init__()
        self._clients = cycle(clients)
        self.sources = len(clients)

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        await next(self._clients).run_once(dialogue, on_chunk)


def awaited(asker: Callable[[], AsyncBaseClient], sampling: SamplingParams) -> GenerationResult:
    async def run() -> GenerationResult:
        return await asker().generate("x", sampling)

    return asyncio.run(run())


KINDS: dict[str, Callable[[Stand, SamplingParams], GenerationResult]] = {
    "resumed": lambda stand, how: Resumed([stand.client(), stand.client()]).generate("x", how),
    "reconnect": lambda stand, how: Client(stand.endpoint, reconnect=True).generate("x", how),
    "async resumed": lambda stand, how: awaited(
        lambda: AsyncResumed([AsyncClient(stand.endpoint) for _ in range(2)]), how
    ),
    "async reconnect": lambda stand, how: awaited(lambda: AsyncClient(stand.endpoint, reconnect=True), how),
    "fleet": lambda stand, how: awaited(lambda: Moved([AsyncClient(stand.endpoint) for _ in range(2)]), how),
}


class Losing:
    """The connection breaks where `before` says so of a message, each time as often as it was told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sound = Dialogue.handle_message
        self.before: list[Callable[[Message], bool]] = []
        self.lost = 0
        monkeypatch.setattr("outrider.orchestrator.client.dialogue.RETRY_SECONDS", 0.0)
        monkeypatch.setattr(Dialogue, "handle_message", lambda dialogue, message: self._take(dialogue, message))

    def _take(self, dialogue: Dialogue, message: Message) -> Chunk | None:
        if self.before and self.before[0](message):
            self.before.pop(0)
            self.lost += 1
            raise EndpointError("the connection has broken")
        return self._sound(dialogue, message)


def is_done(message: Message) -> bool:
    return isinstance(message, Done)


def speaks(codec: TextCodec, text: str, reason: str = "length", sizes: Sequence[int] = (1,)) -> Play:
    """A core that says this text to its end, cut at `max_tokens`, in pieces of these sizes."""
    whole = codec.encode(text, special=False)

    def play(admit: Admit) -> list[ToFront]:
        until = min(len(whole), admit.sampling.max_tokens)
        places = [len(admit.resume_tokens)]
        for size in cycle(sizes):
            if places[-1] >= until:
                break
            places.append(min(places[-1] + size, until))
        new = [Committed(admit.request, whole[a:b]) for a, b in pairwise(places)]
        return [RequestBegan(admit.request, "ssd"), *new, RequestEnded(admit.request, reason, Timings())]

    return play


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a while with", {"stop": ("without",)}),  # an end that may begin a stop string is held back until the end
        ("a while without it", {"stop": ("without",)}),
        ("a\nwhile", {}),
        ("a 🙂", {"cut": 1}),  # inside of a character
        ("b 你", {"cut": 1, "stop": ("\ufffd",)}),  # that makes a stop string in the end
    ],
    ids=["held", "stop", "plain", "character", "stop of a cut character"],
)
def test_text_with_a_lost_end_is_completed_once(
    stands: Callable[..., list[Stand]],
    codec: TextCodec,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    text: str,
    changes: dict[str, Any],
) -> None:
    changes = dict(changes)
    tokens = codec.encode(text, special=False)
    how = SamplingParams(max_tokens=len(tokens) - changes.pop("cut", 0), seed=1, **changes)
    (stand,) = stands(None)
    stand.core.play = speaks(codec, text)
    whole = KINDS[kind](stand, how)
    losing = Losing(monkeypatch)
    losing.before = [is_done, is_done]
    found = KINDS[kind](stand, how)
    assert losing.lost == 2
    assert (found.text, found.token_ids, found.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)


def test_text_is_the_same_wherever_the_connection_breaks(
    stands: Callable[..., list[Stand]], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OUTRIDER_LOST_ENDS=1000 the long form: so many resumptions, each kind of client in turn."""
    (stand,), losing = stands(None), Losing(monkeypatch)
    differing, number = [], 0
    while losing.lost < LOST_ENDS:
        draws = random.Random(number)
        text = "".join(draws.choice(LETTERS) for _ in range(draws.randint(1, 12)))
        begin = draws.randrange(len(text))
        stop = tuple(text[begin : begin + draws.randint(1, 4)] + extra for extra in draws.choice((("?",), ("",), ())))
        how = SamplingParams(max_tokens=draws.randint(1, 24), seed=number, stop=stop)
        stand.core.play = speaks(codec, text, "length", [draws.randint(1, 4) for _ in range(3)])
        kind = list(KINDS)[number % len(KINDS)]
        whole = KINDS[kind](stand, how)
        losing.before = [_falls(draws), is_done][: draws.randint(1, 2)] if draws.random() < 0.5 else [is_done]
        found = KINDS[kind](stand, how)
        losing.before = []
        if (found.text, found.token_ids, found.finish_reason) != (whole.text, whole.token_ids, whole.finish_reason):
            differing.append((number, kind, whole.text, found.text, whole.finish_reason, found.finish_reason))
        number += 1
    print(f"{losing.lost} resumptions of {number} texts, {len(differing)} differing")
    assert not differing


def _falls(draws: random.Random) -> Callable[[Message], bool]:
    """Before the message of this number, or the end."""
    left = iter(range(draws.randint(1, 5), -1, -1))
    return lambda message: is_done(message) or next(left) == 0
