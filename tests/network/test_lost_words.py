"""No lost message stalls a request, and no repeated or late one changes it: each kind by itself, without randomness.

One request at a time on a network that loses, repeats or delays exactly one kind of message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.orchestrator.events import Admit, RequestEnded
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Halt,
    Message,
    Open,
    Outcome,
    Prepare,
    Resync,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from tests.network.stories import DRAFT, TARGET
from tests.network.transport import Way
from tests.network.world import Setting, World
from tests.pairwise import matrix
from tests.system.links import VirtualClock

SAMPLING = SamplingParams(max_tokens=20, temp=0.8, seed=4)
PROMPT = (1, 2, 3, 1)
MODES = ("ar", "sd", "ssd", "auto")
KINDS = (Open, Verify, Prepare, Halt, Commit, Outcome, Branches, Drafted)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    clock.skip(10**9)
    yield lambda **setting: World(TARGET, DRAFT, Setting(**setting), clock)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Message], bool]], list[Message]]:
    """`losing(is_lost)` removes these messages from bundles, and returns the list to which they are added."""
    put = Way.put

    def install(is_lost: Callable[[Message], bool]) -> list[Message]:
        lost: list[Message] = []

        def selective(self: Way, *messages: Message) -> None:
            kept = []
            for message in messages:
                (lost if is_lost(message) else kept).append(message)
            if kept:
                put(self, *kept)

        monkeypatch.setattr(Way, "put", selective)
        return lost

    return install


def run(world: World, mode: str, most: int = 3000) -> Any:
    """Runs one request to its end."""
    world.begin(Admit("r", PROMPT, SAMPLING, mode, frozenset()))
    for _ in range(most):
        if not world.rounds.active:
            break
        world.tick()
    return world.watch.requests["r"].ending


@matrix(nth=[1, 2, 5], kind=KINDS, mode=MODES)
def test_lost_message_stalls_no_request(world: Any, losing: Any, mode: str, kind: type[Message], nth: int) -> None:
    seen: list[Message] = []

    def is_lost(message: Message) -> bool:
        seen.extend([message] if isinstance(message, kind) else [])
        return isinstance(message, kind) and len(seen) == nth

    losing(is_lost)
    assert isinstance(run(world(), mode), RequestEnded)


@pytest.mark.parametrize("mode", MODES)
def test_lost_retries_and_answers_stall_no_request(world: Any, losing: Any, mode: str) -> None:
    """Loses each message about the third round and later until it is sent a third time."""
    sent: dict[tuple[object, ...], int] = {}

    def is_lost(message: Message) -> bool:
        if not isinstance(message, (*KINDS, Resync)) or getattr(message, "round", 3) < 3:
            return False
        key = (type(message), getattr(message, "epoch", 0), getattr(message, "round", 0))
        sent[key] = sent.get(key, 0) + 1
        return sent[key] < 3 and len(sent) < 30

    losing(is_lost)
    assert isinstance(run(world(), mode, 20_000), RequestEnded)


def test_lost_outcome_of_an_autonomous_target_starts_a_new_epoch(world: Any, losing: Any) -> None:
    """The target no longer has that outcome when VERIFY is repeated."""
    cluster = world(ngrams=False)
    losing(lambda message: isinstance(message, Outcome) and message.round == 4 and message.epoch == 0)
    assert isinstance(run(cluster, "ar"), RequestEnded)
    assert cluster.journal.counts["received"] and cluster.watch.requests["r"].place[0] == 1


def test_repeated_open_starts_no_new_epoch(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = world()
    opened: list[Message] = []
    put = Way.put

    def late(self: Way, *messages: Message) -> None:
        opened.extend(message for message in messages if isinstance(message, Open))
        put(self, *messages)
        if any(isinstance(message, Outcome) and message.round == 3 for message in messages):
            for node in cluster.nodes.values():
                put(node.link.down, opened[0])

    monkeypatch.setattr(Way, "put", late)
    assert isinstance(run(cluster, "ssd"), RequestEnded)
    assert cluster.watch.requests["r"].place[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_request_with_a_lost_close_is_freed_when_others_come(world: Any, losing: Any, mode: str) -> None:
    cluster = world()
    lost = losing(lambda message: isinstance(message, Close) and message.request == "r")
    run(cluster, mode)
    held = [node.worker for node in cluster.nodes.values()]
    assert lost and "r" in held[0]._running
    cluster.pause(600)
    cluster.begin(Admit("s", PROMPT, SAMPLING, "ssd", frozenset()))
    for _ in range(1000):
        cluster.tick()
    assert not cluster.rounds.active
    assert not held[0]._running and not held[1]._running
