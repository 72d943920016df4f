"""No lost message stalls a request, and no duplicate or late message changes it.

One request at a time, on a network that drops or repeats chosen messages of one type, without randomness.
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
from tests.network.simulated_cluster import ClusterSettings, SimulatedCluster
from tests.network.stories import DRAFT, TARGET
from tests.network.transport import OneWayLink
from tests.pairwise import matrix
from tests.system.links import VirtualClock

SAMPLING = SamplingParams(max_tokens=20, temp=0.8, seed=4)
PROMPT = (1, 2, 3, 1)
MODES = ("ar", "sd", "ssd", "auto")
KINDS = (Open, Verify, Prepare, Halt, Commit, Outcome, Branches, Drafted)


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimulatedCluster]]:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    clock.skip(10**9)
    yield lambda **settings: SimulatedCluster(TARGET, DRAFT, ClusterSettings(**settings), clock)


@pytest.fixture
def drop_messages(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Message], bool]], list[Message]]:
    """`drop_messages(should_drop)`: the network drops these messages from now on; returns the list of dropped ones."""
    send = OneWayLink.send

    def install(should_drop: Callable[[Message], bool]) -> list[Message]:
        dropped: list[Message] = []

        def send_rest(self: OneWayLink, *messages: Message) -> None:
            kept = []
            for message in messages:
                (dropped if should_drop(message) else kept).append(message)
            if kept:
                send(self, *kept)

        monkeypatch.setattr(OneWayLink, "send", send_rest)
        return dropped

    return install


def run(make_cluster: SimulatedCluster, mode: str, max_ticks: int = 3000) -> Any:
    """Runs one request to its end."""
    make_cluster.begin(Admit("r", PROMPT, SAMPLING, mode, frozenset()))
    for _ in range(max_ticks):
        if not make_cluster.rounds.active:
            break
        make_cluster.tick()
    return make_cluster.checker.requests["r"].ending


@matrix(nth=[1, 2, 5], kind=KINDS, mode=MODES)
def test_lost_message_stalls_no_request(
    make_cluster: Any, drop_messages: Any, mode: str, kind: type[Message], nth: int
) -> None:
    seen: list[Message] = []

    def should_drop(message: Message) -> bool:
        seen.extend([message] if isinstance(message, kind) else [])
        return isinstance(message, kind) and len(seen) == nth

    drop_messages(should_drop)
    assert isinstance(run(make_cluster(), mode), RequestEnded)


@pytest.mark.parametrize("mode", MODES)
def test_lost_retries_and_answers_stall_no_request(make_cluster: Any, drop_messages: Any, mode: str) -> None:
    """Loses each message about the third round and later until it is sent a third time."""
    sent: dict[tuple[object, ...], int] = {}

    def should_drop(message: Message) -> bool:
        if not isinstance(message, (*KINDS, Resync)) or getattr(message, "round", 3) < 3:
            return False
        key = (type(message), getattr(message, "epoch", 0), getattr(message, "round", 0))
        sent[key] = sent.get(key, 0) + 1
        return sent[key] < 3 and len(sent) < 30

    drop_messages(should_drop)
    assert isinstance(run(make_cluster(), mode, 20_000), RequestEnded)


def test_lost_outcome_of_an_autonomous_target_starts_a_new_epoch(make_cluster: Any, drop_messages: Any) -> None:
    """The target no longer has that outcome when VERIFY is repeated."""
    cluster = make_cluster(ngrams=False)
    drop_messages(lambda message: isinstance(message, Outcome) and message.round == 4 and message.epoch == 0)
    assert isinstance(run(cluster, "ar"), RequestEnded)
    assert cluster.log.counts["received"] and cluster.checker.requests["r"].position[0] == 1


def test_repeated_open_starts_no_new_epoch(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster()
    opens: list[Message] = []
    send = OneWayLink.send

    def send_again(self: OneWayLink, *messages: Message) -> None:
        opens.extend(message for message in messages if isinstance(message, Open))
        send(self, *messages)
        if any(isinstance(message, Outcome) and message.round == 3 for message in messages):
            for process in cluster.processes.values():
                send(process.link.down, opens[0])

    monkeypatch.setattr(OneWayLink, "send", send_again)
    assert isinstance(run(cluster, "ssd"), RequestEnded)
    assert cluster.checker.requests["r"].position[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_request_with_a_lost_close_is_freed_when_others_come(make_cluster: Any, drop_messages: Any, mode: str) -> None:
    cluster = make_cluster()
    dropped = drop_messages(lambda message: isinstance(message, Close) and message.request == "r")
    run(cluster, mode)
    workers = [process.worker for process in cluster.processes.values()]
    assert dropped and "r" in workers[0]._running
    cluster.pause(600)
    cluster.begin(Admit("s", PROMPT, SAMPLING, "ssd", frozenset()))
    for _ in range(1000):
        cluster.tick()
    assert not cluster.rounds.active
    assert not workers[0]._running and not workers[1]._running
