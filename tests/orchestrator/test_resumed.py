"""A text that its server can't finish continues unchanged on the next of several servers. Servers are scripted."""

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
from tests.orchestrator.scripted_server import OnAdmit, ScriptedServer, worker_stats

TEXT = "def héllo(x):\n    return '你好' + x\n"
SAMPLING = SamplingParams(max_tokens=64, temp=0.8)
GONE = "the target died too often"


def generates_then_fails(codec: TextCodec, tokens: int | None, kind: str = "ServerStopped") -> OnAdmit:
    """Returns an `on_admit` that commits `tokens` more tokens of the text and then fails, or all of it if None."""
    text = codec.encode(TEXT, special=False)

    def on_admit(admit: Admit) -> list[ToFront]:
        until = None if tokens is None else len(admit.resume_tokens) + tokens
        new: list[ToFront] = [Committed(admit.request, (token,)) for token in text[len(admit.resume_tokens) : until]]
        if until is None or until >= len(text):
            last: ToFront = RequestEnded(admit.request, "length", Timings(predicted_n=len(new)))
        else:
            last = Failed(admit.request, kind, GONE)
        return [RequestBegan(admit.request, "ssd"), *new, last]

    return on_admit


@pytest.fixture
def make_servers(endpoint: str, codec: TextCodec) -> Iterator[Callable[..., list[ScriptedServer]]]:
    """`make_servers(2, None)` starts servers that generate so many tokens each before they fail."""
    pair, running = choose_pair(ServeSettings()), list[ScriptedServer]()
    loaded = load_pair(pair)

    def make(*tokens: int | None, kind: str = "ServerStopped") -> list[ScriptedServer]:
        for count in tokens:
            running.append(ScriptedServer(pair, loaded, f"{endpoint}-{len(running)}"))
            running[-1].core.on_admit = generates_then_fails(codec, count, kind)
            running[-1].start()
        return running[-len(tokens) :]

    yield make
    for server in running:
        server.stop()


def clients(servers: list[ScriptedServer]) -> list[Client]:
    return [server.client() for server in servers]


def test_text_is_complete_after_breaks_at_any_token(
    make_servers: Callable[..., list[ScriptedServer]], codec: TextCodec
) -> None:
    tokens = codec.encode(TEXT, special=False)
    for first in range(len(tokens)):
        made = list(make_servers(first, first // 2, None))
        result = Resumed(clients(made)).generate("x", SAMPLING)
        assert (result.text, result.token_ids) == (TEXT, tokens)
        asked = [admit for server in made for admit in server.core.received if isinstance(admit, Admit)]
        assert [len(admit.resume_tokens) for admit in asked] == [0, first, first + first // 2][: len(asked)]
        assert len({admit.sampling.seed for admit in asked}) == 1 and asked[0].sampling.seed is not None
        for server in made:
            server.stop()


def test_async_resumed_completes_the_text(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    async def run() -> str:
        return (await AsyncResumed([AsyncClient(s.endpoint) for s in make_servers(3, 0, 4, None)]).generate("x")).text

    assert asyncio.run(run()) == TEXT


def test_servers_take_turns_until_the_text_is_complete(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    """The server that answered last is asked first the next time."""
    made = make_servers(4, 5)
    both = Resumed(clients(made))
    assert both.generate("x", SAMPLING).text == TEXT
    assert both.generate("x", SAMPLING).text == TEXT
    counts = [len([one for one in server.core.received if isinstance(one, Admit)]) for server in made]
    assert min(counts) >= 2


def test_dead_server_is_skipped(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    dead, alive = make_servers(None, None)
    client = Resumed(clients([dead, alive]))
    dead.stop()
    assert client.generate("x", SAMPLING).text == TEXT
    alive.stop()
    with pytest.raises(OutriderError, match="no server at"):
        client.generate("x", SAMPLING)


def set_fingerprint(server: ScriptedServer, fingerprint: str) -> None:
    workers = (replace(worker_stats("target"), fingerprint=fingerprint), worker_stats("draft"))
    server.queues.events.put(WorkersChanged(workers))


def test_server_with_other_weights_is_skipped(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    made = make_servers(4, None, None)
    for server, fingerprint in zip(made, ("a", "b", "a"), strict=True):
        set_fingerprint(server, fingerprint)
        while server.admission.target_fingerprint != fingerprint:
            server.client().stats()
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    assert [len([one for one in server.core.received if isinstance(one, Admit)]) for server in made] == [1, 0, 1]
    with pytest.raises(OtherModel, match="began with another model"):
        Resumed(clients(made[:2])).generate("x", SAMPLING)


def test_request_that_kills_workers_is_given_up_after_two_servers(
    make_servers: Callable[..., list[ScriptedServer]],
) -> None:
    made = make_servers(2, 2, 2, 2, None, kind="WorkerError")
    with pytest.raises(WorkerError, match=GONE):
        Resumed(clients(made)).generate("x", SAMPLING)
    assert sum(isinstance(one, Admit) for server in made for one in server.core.received) == 2


def test_reconnecting_client_asks_again_after_one_worker_error(
    make_servers: Callable[..., list[ScriptedServer]], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.orchestrator.client.dialogue.RETRY_SECONDS", 0.0)
    (server,) = make_servers(3, kind="WorkerError")
    with pytest.raises(WorkerError, match=GONE):
        Client(server.endpoint, reconnect=True).generate("x", SAMPLING)
    assert [len(one.resume_tokens) for one in server.core.received if isinstance(one, Admit)] == [0, 3]
    server.core.on_admit = generates_then_fails(codec, 3, "ServerBusy")
    assert Client(server.endpoint, reconnect=True).generate("x", SAMPLING).text == TEXT


def test_busy_server_is_skipped(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    made = make_servers(0, None, kind="ServerBusy")
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    with pytest.raises(ServerBusy):
        Resumed(clients(made[:1])).generate("x", SAMPLING)


def test_invalid_request_raises_and_servers_stay_usable(make_servers: Callable[..., list[ScriptedServer]]) -> None:
    made = make_servers(None, None)
    with pytest.raises(InvalidRequest, match="expected ids from 0"):
        Resumed(clients(made)).generate([10**6], SAMPLING)
    assert Resumed(clients(made)).generate("x", SAMPLING).text == TEXT
    with pytest.raises(InvalidRequest, match=r"clients is \[\]; expected a list of clients"):
        Resumed([])


def test_resumed_request_goes_first_in_the_queue() -> None:
    queue = FairQueue[str]()
    for client, name in (((b"a",), "a1"), ((b"b",), "b1"), ((b"a",), "a2")):
        queue.put(client, name)
    queue.put((b"a",), "a0", first=True)
    queue.put((b"c",), "c0", first=True)
    assert [queue.take() for _ in range(len(queue))] == ["c0", "a0", "b1", "a1", "a2"]


def test_generate_command_continues_on_the_next_server(
    make_servers: Callable[..., list[ScriptedServer]], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = ",".join(server.endpoint for server in make_servers(3, None))
    assert main(["generate", "--connect", endpoints, "-p", "x", "--temp", "0.8"]) == 0
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
    captured = capsys.readouterr()
    assert sentence in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


@pytest.mark.parametrize("clients", [[], ["ipc:///tmp/a"], None, "ipc:///tmp/a", [AsyncClient("ipc:///tmp/a")]])
def test_resumed_needs_a_list_of_clients(clients: Any) -> None:
    with pytest.raises(InvalidRequest, match="client"):
        Resumed(clients)


def test_async_resumed_needs_async_clients() -> None:
    clients: list[Any] = [Client("ipc:///tmp/a")]
    with pytest.raises(InvalidRequest, match=r"such as \[AsyncClient\(A\), AsyncClient\(B\)\]"):
        AsyncResumed(clients)


# --- lost last messages -------------------------------------------------------------------------------------------

LOST_ENDS = int(os.environ.get("OUTRIDER_LOST_ENDS", "60"))
LETTERS = ("ile with ", "def ", "é", "你", "好", "🙂", "x", "\n", "return ", "wi")


class FleetClient(AsyncBaseClient):
    """Asks one engine after another, as a fleet does."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        super().__init__()
        self._clients = cycle(clients)
        self.sources = len(clients)

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        await next(self._clients).run_once(dialogue, on_chunk)


def run_async(make_client: Callable[[], AsyncBaseClient], sampling: SamplingParams) -> GenerationResult:
    async def run() -> GenerationResult:
        return await make_client().generate("x", sampling)

    return asyncio.run(run())


KINDS: dict[str, Callable[[ScriptedServer, SamplingParams], GenerationResult]] = {
    "resumed": lambda server, how: Resumed([server.client(), server.client()]).generate("x", how),
    "reconnect": lambda server, how: Client(server.endpoint, reconnect=True).generate("x", how),
    "async resumed": lambda server, how: run_async(
        lambda: AsyncResumed([AsyncClient(server.endpoint) for _ in range(2)]), how
    ),
    "async reconnect": lambda server, how: run_async(lambda: AsyncClient(server.endpoint, reconnect=True), how),
    "fleet": lambda server, how: run_async(lambda: FleetClient([AsyncClient(server.endpoint) for _ in range(2)]), how),
}


class ConnectionBreaker:
    """Breaks the connection before the first message for which `before[0]` returns True, then removes that function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._handle_message = Dialogue.handle_message
        self.before: list[Callable[[Message], bool]] = []
        self.lost = 0
        monkeypatch.setattr("outrider.orchestrator.client.dialogue.RETRY_SECONDS", 0.0)
        monkeypatch.setattr(
            Dialogue, "handle_message", lambda dialogue, message: self._handle_or_break(dialogue, message)
        )

    def _handle_or_break(self, dialogue: Dialogue, message: Message) -> Chunk | None:
        if self.before and self.before[0](message):
            self.before.pop(0)
            self.lost += 1
            raise EndpointError("the connection has broken")
        return self._handle_message(dialogue, message)


def is_done(message: Message) -> bool:
    return isinstance(message, Done)


def generates_in_pieces(codec: TextCodec, text: str, reason: str = "length", sizes: Sequence[int] = (1,)) -> OnAdmit:
    """Returns an `on_admit` that commits this text, cut at `max_tokens`, in pieces of these sizes."""
    whole = codec.encode(text, special=False)

    def on_admit(admit: Admit) -> list[ToFront]:
        until = min(len(whole), admit.sampling.max_tokens)
        endpoints = [len(admit.resume_tokens)]
        for size in cycle(sizes):
            if endpoints[-1] >= until:
                break
            endpoints.append(min(endpoints[-1] + size, until))
        new = [Committed(admit.request, whole[a:b]) for a, b in pairwise(endpoints)]
        return [RequestBegan(admit.request, "ssd"), *new, RequestEnded(admit.request, reason, Timings())]

    return on_admit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a while with", {"stop": ("without",)}),  # text that may begin a stop string is held back until the end
        ("a while without it", {"stop": ("without",)}),
        ("a\nwhile", {}),
        ("a 🙂", {"cut": 1}),  # the cut is inside a character
        ("b 你", {"cut": 1, "stop": ("\ufffd",)}),  # the incomplete character becomes a stop string
    ],
    ids=["held", "stop", "plain", "character", "stop of a cut character"],
)
def test_text_with_a_lost_end_is_completed_once(
    make_servers: Callable[..., list[ScriptedServer]],
    codec: TextCodec,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    text: str,
    changes: dict[str, Any],
) -> None:
    changes = dict(changes)
    tokens = codec.encode(text, special=False)
    how = SamplingParams(max_tokens=len(tokens) - changes.pop("cut", 0), seed=1, **changes)
    (server,) = make_servers(None)
    server.core.on_admit = generates_in_pieces(codec, text)
    whole = KINDS[kind](server, how)
    breaker = ConnectionBreaker(monkeypatch)
    breaker.before = [is_done, is_done]
    found = KINDS[kind](server, how)
    assert breaker.lost == 2
    assert (found.text, found.token_ids, found.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)


def test_text_is_the_same_wherever_the_connection_breaks(
    make_servers: Callable[..., list[ScriptedServer]], codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses each kind of client in turn. OUTRIDER_LOST_ENDS sets the number of broken connections."""
    (server,), breaker = make_servers(None), ConnectionBreaker(monkeypatch)
    differing, number = [], 0
    while breaker.lost < LOST_ENDS:
        draws = random.Random(number)
        text = "".join(draws.choice(LETTERS) for _ in range(draws.randint(1, 12)))
        begin = draws.randrange(len(text))
        stop = tuple(text[begin : begin + draws.randint(1, 4)] + extra for extra in draws.choice((("?",), ("",), ())))
        how = SamplingParams(max_tokens=draws.randint(1, 24), seed=number, stop=stop)
        server.core.on_admit = generates_in_pieces(codec, text, "length", [draws.randint(1, 4) for _ in range(3)])
        kind = list(KINDS)[number % len(KINDS)]
        whole = KINDS[kind](server, how)
        breaker.before = [_breaks_early(draws), is_done][: draws.randint(1, 2)] if draws.random() < 0.5 else [is_done]
        found = KINDS[kind](server, how)
        breaker.before = []
        if (found.text, found.token_ids, found.finish_reason) != (whole.text, whole.token_ids, whole.finish_reason):
            differing.append((number, kind, whole.text, found.text, whole.finish_reason, found.finish_reason))
        number += 1
    print(f"{breaker.lost} resumptions of {number} texts, {len(differing)} differing")
    assert not differing


def _breaks_early(draws: random.Random) -> Callable[[Message], bool]:
    """Returns a function that is True of a random early message, or of the last one."""
    left = iter(range(draws.randint(1, 5), -1, -1))
    return lambda message: is_done(message) or next(left) == 0
