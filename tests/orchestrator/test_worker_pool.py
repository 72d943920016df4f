"""Workers that are accepted, refused, frozen, lost or restarted; over real sockets, with fake processes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from outrider.orchestrator.core import worker_pool
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import (
    FROZEN_AFTER_PINGS,
    LOST_AFTER_PINGS,
    MAX_INVALID_MESSAGES,
    MAX_STALL_RATIO,
    MAX_WORKERS,
    UNKNOWN_STALL_RATIO,
    WorkerLoss,
)
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.sockets import Rate, RateLimiter
from outrider.protocol import clock
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode, encode
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import (
    Abilities,
    Branches,
    Close,
    Drafted,
    Fault,
    Hello,
    KvMemory,
    Loading,
    Message,
    Outcome,
    Ping,
    Pong,
    PromptKv,
    Resync,
    Shutdown,
    Span,
    Welcome,
    is_serving,
)
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.stats import KvCost
from outrider.protocol.worker_link import heartbeat_id, routing_id

WAIT_MS = 200_000

LIKELY_CAUSE = system.likely_cause


class FakeProcess:
    """A process that the pool believes to have started."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None
        self.tail = ""
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def log_tail(self) -> str:
        return self.tail

    def kill(self) -> None:
        self.killed, self.code = True, -9

    def terminate(self) -> None: ...

    def wait(self, grace: float) -> int:
        return 0


class CountingSocket(zmq.Socket[bytes]):
    """Counts the messages that it has `sent`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["sent"] = 0

    def send(self, data: Any, flags: int = 0, **options: Any) -> Any:  # type: ignore[override]
        self.__dict__["sent"] += not flags & zmq.SNDMORE
        return super().send(data, flags, **options)


class Peer:
    """A process on the workers' socket, with the routing id of `incarnation` unless `identity` is another."""

    def __init__(self, harness: PoolHarness, role: str, incarnation: int, identity: bytes | None = None) -> None:
        self.harness, self.role, self.incarnation, self.kv = harness, role, incarnation, KvCost()
        self.socket = harness.dealer(identity or routing_id(incarnation))
        self.heartbeat = harness.dealer(heartbeat_id(identity or routing_id(incarnation)))

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def hello(self, name: str = "", model: str = "m", context: int = 100, **others: Any) -> Message:
        fields = (self.role, name, 1, "mlx", model, 10, context, 1, 1000)
        self.send(
            Hello(
                *fields, kv=self.kv, incarnation=self.incarnation, **{"abilities": Abilities(takes_kv=True), **others}
            )
        )
        return self.receive()

    def receive(self) -> Message:
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.socket.poll(5):
            self.harness.listen()
            assert time.monotonic() < deadline, "no message arrived"
        return decode(self.socket.recv_multipart())

    def receive_shutdown(self) -> Shutdown:
        while not isinstance(message := self.receive(), Shutdown):
            pass
        return message

    def drain(self) -> list[Message]:
        """Returns all messages that arrive within 50 ms of each other, for tests that none arrives."""
        return [decode(self.socket.recv_multipart()) for _ in iter(lambda: self.socket.poll(50), 0)]

    def answer(self, progress: int = 0, expected_ms: int = 0, ahead_ns: int | None = None) -> None:
        """Answers all pings, and waits until the pool has received the answers.

        `ahead_ns`: how far this peer's clock is ahead; None if it does not send its time.
        """
        latest, serial = self.harness.pool._ping_serial, 0
        while serial < latest:
            ping = decode(self.heartbeat.recv_multipart())
            assert isinstance(ping, Ping)
            serial = ping.serial
            clock_ns = 0 if ahead_ns is None else clock.now() + ahead_ns
            self.heartbeat.send_multipart(encode(Pong(serial, progress, expected_ms, clock_ns)))
        worker = self.harness.pool._registry.at(routing_id(self.incarnation))
        while worker is not None and worker.heartbeat.unanswered:
            assert self.harness.pool.socket.poll(WAIT_MS)
            self.harness.listen()


def welcome(name: str) -> Welcome:
    """Returns the answer of a cluster with the default `worker_timeout`."""
    return Welcome(name, ping_ms=250)


class PoolHarness:
    """A worker pool with fake processes and a fake clock."""

    def __init__(self, directory: Path, settings: ServeSettings) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.pool = WorkerPool(self.context, settings, directory)
        self.read, self._received = 0, self.pool.router.receive_waiting
        self.pool.router.receive_waiting = self._receive  # type: ignore[method-assign]
        self.dealers: list[CountingSocket] = []
        self.received: list[tuple[str, Message]] = []
        self.spawned: dict[str, tuple[int, FakeProcess]] = {}
        self.starts: list[str] = []
        self.arrived: list[str] = []
        self.fails_to_start = False
        self.seconds = 0.0

    def spawn(self, role: str, name: str, endpoint: str, settings: object, run_dir: object, incarnation: int) -> Any:
        if self.fails_to_start:
            raise WorkerError("no process can be started")
        self.starts.append(name)
        self.spawned[name] = (incarnation, FakeProcess())
        return self.spawned[name][1]

    def dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER, socket_class=CountingSocket)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self.pool.endpoint)
        self.dealers.append(socket)
        return socket

    def listen(self) -> None:
        self.received += self.pool.receive()

    def settle(self) -> None:
        """Waits until the pool has received all messages that peers have sent."""
        while self.read < sum(dealer.sent for dealer in self.dealers):
            assert self.pool.socket.poll(WAIT_MS), "a message that was sent has not arrived"
            self.listen()

    def _receive(self) -> Iterator[Any]:
        for one in self._received():
            self.read += 1
            yield one

    def worker(self, name: str, kv: KvCost | None = None) -> Peer:
        """Returns the peer of the process that was spawned with this name, which has become ready."""
        peer = Peer(self, name.partition("-")[0], self.spawned[name][0])
        peer.kv = kv or peer.kv
        assert peer.hello(name) == Welcome(name, round(1000 * self.pool.ping_interval_s))
        return peer

    @property
    def ready(self) -> bool:
        return is_serving(self.pool.stats())

    @property
    def has_target(self) -> bool:
        return self.states().get("target-0") in ("ready", "frozen")

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.pool.stats()}

    def losses(self) -> list[WorkerLoss]:
        self.arrived += [worker.name for worker in self.pool.arrivals()]
        return self.pool.losses(int(self.seconds * SECOND_NS))

    def pass_time(
        self, pings: int, *answering: Peer, with_progress: bool = True, expected_ms: int = 0
    ) -> list[WorkerLoss]:
        """Sends pings a second apart, which the `answering` peers answer. Returns the losses."""
        losses: list[WorkerLoss] = []
        for _ in range(pings):
            self.seconds += 1
            self.pool.ping(int(self.seconds * SECOND_NS))
            for peer in answering:
                peer.answer(int(self.seconds) if with_progress else 0, expected_ms)
            losses += self.losses()
        return losses

    def close(self) -> None:
        self.pool.close()
        self.context.destroy(linger=0)


@pytest.fixture
def make_harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PoolHarness]]:
    harnesses: list[PoolHarness] = []

    def make(**settings: Any) -> PoolHarness:
        directory = stack.enter_context(PrivateDirectory())
        harnesses.append(PoolHarness(directory.path, ServeSettings(**settings)))
        monkeypatch.setattr(worker_pool, "spawn_worker", harnesses[-1].spawn)
        # The tests themselves may run under limits.
        monkeypatch.setattr(system, "likely_cause", lambda code, log_tail="": "")
        harnesses[-1].pool.start()
        return harnesses[-1]

    with ExitStack() as stack:
        yield make
        for harness in harnesses:
            harness.close()


@pytest.fixture
def harness(make_harness: Callable[..., PoolHarness]) -> PoolHarness:
    return make_harness()


# --- joining ------------------------------------------------------------------------------------------------------


def test_a_cluster_is_ready_with_the_workers_it_started(harness: PoolHarness) -> None:
    assert not harness.ready and not harness.has_target
    harness.worker("target-0")
    harness.worker("draft-0")
    assert harness.ready and harness.has_target and harness.pool.drafters() == {"draft-0"}


def test_cluster_starts_without_a_draft_model_that_cannot_draft(harness: PoolHarness) -> None:
    draft = Peer(harness, "draft", harness.spawned["draft-0"][0])
    draft.send(Fault(None, "a llama4 model can't draft", dispensable=True))
    harness.settle()
    assert not harness.ready
    harness.worker("target-0")
    harness.spawned["draft-0"][1].code = 3
    assert harness.ready and harness.losses() == [] and harness.pool.drafters() == set()
    assert harness.pool.notes() == ["no draft model: a llama4 model can't draft"]


def test_notes_name_what_the_drafter_left_out(harness: PoolHarness) -> None:
    harness.worker("target-0")
    draft = Peer(harness, "draft", harness.spawned["draft-0"][0])
    other = Abilities(left_out=("prompts are read by MLX: no Core ML",))
    draft.send(Hello("draft", "draft-0", 1, "mlx", "m", 10, 9, 1, 1, incarnation=draft.incarnation, abilities=other))
    harness.settle()
    assert harness.pool.notes() == ["prompts are read by MLX: no Core ML"]


def test_any_other_fault_at_the_start_is_fatal(harness: PoolHarness) -> None:
    Peer(harness, "draft", harness.spawned["draft-0"][0]).send(Fault(None, "no model at /x"))
    harness.settle()
    harness.spawned["draft-0"][1].code = 3
    assert [(loss.why, loss.fatal) for loss in harness.losses()] == [("no model at /x", True)]


def test_target_abilities_are_read_from_its_hello(harness: PoolHarness) -> None:
    assert harness.pool.target_abilities == Abilities() and harness.pool.notes() == []
    target = Peer(harness, "target", harness.spawned["target-0"][0])
    able = Abilities(chains=False, why="it decodes token by token")
    target.send(Hello("target", "target-0", 1, "mlx", "m", 10, 9, 1, 1, incarnation=target.incarnation, abilities=able))
    assert target.receive() == welcome("target-0")
    assert harness.pool.target_abilities == able
    assert harness.pool.notes() == ["speculation is off: it decodes token by token"]


def test_stranger_with_the_name_of_a_worker_is_refused(harness: PoolHarness) -> None:
    target, draft = harness.worker("target-0"), harness.worker("draft-0")
    cases = [(role, name) for role in ("target", "draft") for name in ("target-0", "draft-0")]
    for serial, (role, name) in enumerate(cases):
        stranger = Peer(harness, role, serial)
        refusal = stranger.hello(name, model="another", context=5)
        assert isinstance(refusal, Shutdown)
        assert ("accepts no other" if role == "target" else f"the name {name} is taken") in refusal.reason
        stranger.send(Resync("r", 0))
    harness.settle()
    assert harness.received == [] and harness.pool.rejected == 8
    assert harness.pool.target_context == 100 and harness.states() == {"target-0": "ready", "draft-0": "ready"}
    harness.pool.send_target(Close("a"))
    harness.pool.send_worker("draft-0", Close("b"))
    harness.pool.flush()
    assert (target.receive(), draft.receive()) == (Close("a"), Close("b"))


@pytest.mark.parametrize("early", [True, False])
def test_peer_with_a_worker_name_as_routing_id_changes_nothing(harness: PoolHarness, early: bool) -> None:
    if not early:
        harness.worker("target-0")
    stray = Peer(harness, "target", 5, identity=b"target-0")
    stray.send(Loading("taking over"))
    stray.send(Fault(None, "I am broken"))
    stray.heartbeat.send_multipart(encode(Pong(0, 1)))
    assert isinstance(stray.hello("target-0"), Shutdown)
    target = harness.worker("target-0") if early else None
    harness.pool.send_target(Close("r"))
    harness.pool.flush()
    assert harness.pool.stage == "" and harness.losses() == [] and stray.drain() == []
    assert target is None or target.receive() == Close("r")


def test_second_peer_with_the_incarnation_of_a_worker_is_ignored(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    thief = Peer(harness, "target", harness.spawned["target-0"][0])
    thief.send(Hello("target", "target-0", 1, "mlx", "another", 10, 5, 1, 1, incarnation=thief.incarnation))
    thief.send(Resync("r", 0))
    assert not harness.pool.socket.poll(100)
    harness.pool.send_target(Close("r"))
    harness.pool.flush()
    assert target.receive() == Close("r") and thief.drain() == []
    assert harness.received == [] and harness.pool.target_context == 100


def test_repeated_hello_is_answered_again(harness: PoolHarness) -> None:
    """WELCOME may have been lost with its connection; without another the worker would end after some seconds."""
    joined = Peer(harness, "draft", 77)
    joined.kv = KvCost(1, 1)
    first = [joined.hello("mini"), joined.receive()]
    assert first[0] == welcome("mini") and isinstance(first[1], KvMemory) and first[1].limit
    harness.pass_time(LOST_AFTER_PINGS - 1)
    assert [joined.hello("mini"), joined.receive()] == first
    assert harness.pass_time(1) == [] and harness.states()["mini"] == "ready"
    assert harness.pool.rejected == 0


def test_hello_with_another_model_of_a_worker_that_is_ready_changes_nothing(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    target.send(Hello("target", "target-0", 1, "mlx", "another", 10, 5, 1, 1, incarnation=target.incarnation))
    harness.settle()
    assert target.drain() == [] and harness.pool.target_context == 100 and harness.pool.rejected == 1


def test_awaited_target_joins_and_rejoins_with_the_same_files(
    make_harness: Callable[..., PoolHarness], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a target with the same files is accepted, only one at a time, and only with the same model as before."""
    (tmp_path / "config.json").write_text("{}")
    files = model_digest(tmp_path)
    harness = make_harness(await_target=True, model=str(tmp_path), draft_backend="ngram")
    impostor = Peer(harness, "draft", 9).hello("target-0")
    assert isinstance(impostor, Shutdown) and "the name target-0 is the target's" in impostor.reason
    assert harness.starts == [] and not harness.ready and harness.pool.endpoint in harness.pool.stage
    assert ("WARNING", harness.pool.stage) in [(record.levelname, record.message) for record in caplog.records]
    other = Peer(harness, "target", 1).hello(files="0123-4567")
    assert isinstance(other, Shutdown) and "expected the same files on both" in other.reason
    first = Peer(harness, "target", 2)
    assert first.hello(files=files + "77") == welcome("target-0") and harness.ready and harness.losses() == []
    second = Peer(harness, "target", 3).hello(files=files + "77")
    assert isinstance(second, Shutdown) and "already has a target" in second.reason
    (loss,) = harness.pass_time(FROZEN_AFTER_PINGS + LOST_AFTER_PINGS)
    assert loss.gone and not loss.fatal and harness.states() == {"target-0": "restarting"} and not harness.ready
    changed = Peer(harness, "target", 4).hello(files=files + "88")
    assert isinstance(changed, Shutdown) and "came back with another model" in changed.reason
    assert Peer(harness, "target", 5).hello(files=files + "77") == welcome("target-0")
    assert harness.losses() == [] and harness.pool.stats()[0].restarts == 1


def test_awaited_target_that_does_not_return_is_given_up(
    make_harness: Callable[..., PoolHarness], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    harness = make_harness(await_target=True, model=str(tmp_path), draft_backend="none")
    Peer(harness, "target", 1).hello(files=model_digest(tmp_path))
    assert [loss.fatal for loss in harness.pass_time(FROZEN_AFTER_PINGS + LOST_AFTER_PINGS)] == [False]
    harness.seconds += worker_pool.TARGET_WAIT_SECONDS
    (loss,) = harness.losses()
    assert loss.fatal and "none has joined in its place for 10 minutes" in loss.why and harness.losses() == []


def test_worker_that_joins_is_logged_once(harness: PoolHarness, caplog: pytest.LogCaptureFixture) -> None:
    """At the default level, as its loss is; the workers that the server starts are not."""
    harness.worker("target-0")
    joined = Peer(harness, "draft", 77)
    joined.hello("mini", model="/models/draft")
    joined.hello("mini", model="/models/draft")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["draft worker mini has joined, with the model /models/draft"]


def test_joining_drafter_keeps_a_free_name_or_gets_one(harness: PoolHarness) -> None:
    harness.worker("draft-0")
    assert Peer(harness, "draft", 1).hello("studio") == welcome("studio")
    assert Peer(harness, "draft", 2).hello() == welcome("draft-1")
    assert Peer(harness, "draft", 3).hello() == welcome("draft-2")
    taken = Peer(harness, "draft", 4).hello("studio")
    assert isinstance(taken, Shutdown) and "the name studio is taken" in taken.reason
    assert harness.pool.drafters() == {"draft-0", "studio", "draft-1", "draft-2"}


@pytest.mark.parametrize("name", ["x" * 65, "a\nb", "\x1b[31m"])
def test_unprintable_or_long_name_is_refused(harness: PoolHarness, name: str) -> None:
    refusal = Peer(harness, "draft", 1).hello(name)
    assert isinstance(refusal, Shutdown) and "expected at most 64 printable" in refusal.reason


def test_hello_with_a_mismatched_routing_id_is_refused(harness: PoolHarness) -> None:
    refusal = Peer(harness, "draft", 5, identity=b"studio").hello("studio")
    assert isinstance(refusal, Shutdown) and "routing id" in refusal.reason and "studio" not in harness.states()


@pytest.mark.parametrize("settings", [{"colocate": True}, {"draft_backend": "none"}])
def test_server_that_would_not_use_drafters_refuses_them(
    make_harness: Callable[..., PoolHarness], settings: dict[str, Any]
) -> None:
    answer = Peer(make_harness(**settings), "draft", 1).hello()
    assert isinstance(answer, Shutdown) and "without --colocate and --draft-backend none" in answer.reason


def test_number_of_workers_is_limited(harness: PoolHarness) -> None:
    answers = [Peer(harness, "draft", serial + 1).hello() for serial in range(MAX_WORKERS - 1)]
    assert isinstance(answers[-1], Shutdown) and "the maximum" in answers[-1].reason
    assert all(isinstance(answer, Welcome) for answer in answers[:-1])


def test_messages_before_hello_concern_only_their_worker(harness: PoolHarness) -> None:
    target = Peer(harness, "target", harness.spawned["target-0"][0])
    target.send(Loading("reading weights"))
    target.send(Fault(None, "no such file"))
    harness.settle()
    assert harness.pool.stage == "target: reading weights" and harness.pool.status_changed
    harness.spawned["target-0"][1].code = 3
    assert [(loss.why, loss.fatal) for loss in harness.losses()] == [("no such file", True)]


# --- silence ------------------------------------------------------------------------------------------------------


def test_paused_server_does_not_lose_workers(harness: PoolHarness) -> None:
    target, draft = harness.worker("target-0"), harness.worker("draft-0")
    assert harness.pass_time(3, target, draft) == []
    harness.seconds += 100_000
    assert harness.losses() == []
    assert harness.pass_time(3, target, draft) == []
    assert set(harness.states().values()) == {"ready"}


def test_silent_drafter_is_not_used_until_it_answers_again(
    harness: PoolHarness, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = harness.worker("target-0"), harness.worker("draft-0")
    losses = harness.pass_time(FROZEN_AFTER_PINGS + 2, target)
    assert [(loss.worker.name, loss.gone) for loss in losses] == [("draft-0", False)]
    assert harness.pool.drafters() == set() and harness.states()["draft-0"] == "frozen"
    assert "does not answer" not in caplog.text, "the core thread logs the loss that it gets"
    assert not harness.spawned["draft-0"][1].killed
    assert harness.pass_time(1, target, draft) == [] and harness.pool.drafters() == {"draft-0"}
    assert harness.pass_time(2 * LOST_AFTER_PINGS, target, draft) == []


def test_silent_target_is_frozen_until_it_answers_again(harness: PoolHarness) -> None:
    target, draft = harness.worker("target-0"), harness.worker("draft-0")
    assert harness.pass_time(LOST_AFTER_PINGS - 1, draft) == []
    assert harness.states()["target-0"] == "frozen" and harness.has_target
    harness.pass_time(1, target, draft)
    assert harness.states()["target-0"] == "ready"


@pytest.mark.parametrize("name", ["target-0", "draft-0"])
def test_worker_silent_too_long_is_killed_and_its_messages_dropped(harness: PoolHarness, name: str) -> None:
    peers = {each: harness.worker(each) for each in ("target-0", "draft-0")}
    peers_process = harness.spawned[name][1]
    losses = harness.pass_time(LOST_AFTER_PINGS, *(peer for each, peer in peers.items() if each != name))
    assert losses[-1].worker.name == name and "has not answered for 10 s" in losses[-1].why
    assert harness.states()[name] == "restarting" and peers_process.killed
    peers[name].send(Resync("r", 0))
    peers[name].answer()
    harness.settle()
    assert harness.received == [] and harness.states()[name] == "restarting"


PINGS_A_SECOND = LOST_AFTER_PINGS // 10


@pytest.mark.parametrize(
    ("expected_s", "limit_s"),
    [(0, 10 * UNKNOWN_STALL_RATIO), (0.02, 10), (0.9, 10), (1.5, 1.5 * MAX_STALL_RATIO), (4, 4 * MAX_STALL_RATIO)],
    ids=["unknown", "decoding", "a short piece", "a piece of a prompt", "a long one"],
)
def test_worker_without_progress_is_lost_after_ten_times_its_expected_time(
    harness: PoolHarness, expected_s: float, limit_s: float
) -> None:
    target, limit = harness.worker("target-0"), int(limit_s * PINGS_A_SECOND)
    how = {"with_progress": False, "expected_ms": int(1000 * expected_s)}
    assert harness.pass_time(limit, target, **how) == []  # type: ignore[arg-type]
    losses = harness.pass_time(1, target, **how)  # type: ignore[arg-type]
    assert [loss.why for loss in losses] == [f"target worker target-0 has made no progress for {limit_s:.0f} s"]


def test_worker_with_progress_between_long_operations_is_kept(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    for _ in range(3):
        assert harness.pass_time(9 * PINGS_A_SECOND, target, with_progress=False, expected_ms=20) == []
        assert harness.pass_time(1, target, expected_ms=20) == []


@pytest.mark.parametrize("load_s", [0.5, 3.0])
def test_restart_may_take_ten_times_the_last_load_time_after_each_message(
    harness: PoolHarness, monkeypatch: pytest.MonkeyPatch, load_s: float
) -> None:
    harness.worker("target-0")
    target = harness.pool._registry.named("target-0")
    assert target is not None
    target.begun_ns = target.entered_ns - int(load_s * SECOND_NS)
    kill(harness, "target-0")
    harness.pass_time(1)
    assert harness.starts[2:] == ["target-0"]
    limit = int(max(load_s * MAX_STALL_RATIO, 10) * PINGS_A_SECOND)
    assert harness.pass_time(limit - 2) == []
    loading = Peer(harness, "target", harness.spawned["target-0"][0])
    loading.send(Loading("reading weights"))
    harness.settle()
    assert harness.pass_time(limit - 1) == []
    assert "has made no progress while starting" in harness.pass_time(2)[0].why


def test_first_start_has_no_time_limit(harness: PoolHarness) -> None:
    assert harness.pass_time(100 * LOST_AFTER_PINGS) == []


def test_pings_answered_late_in_a_batch_count_as_progress(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    for _ in range(4):
        harness.pass_time(LOST_AFTER_PINGS - 1)
        target.answer(progress=1)
        harness.settle()
        assert [loss for loss in harness.losses() if loss.worker.role == "target"] == []
    assert harness.states()["target-0"] == "ready"


def test_worker_timeout_sets_the_silence_limit(make_harness: Callable[..., PoolHarness]) -> None:
    harness = make_harness(worker_timeout=300)
    harness.worker("target-0")
    assert harness.pass_time(290) == []
    assert harness.pass_time(40)[-1].why == "target worker target-0 has not answered for 300 s"


def test_given_up_joined_drafter_is_notified_and_frees_its_name(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    drafter = Peer(harness, "draft", 9)
    assert drafter.hello("studio") == welcome("studio")
    assert harness.pass_time(LOST_AFTER_PINGS, target)[-1].worker.name == "studio"
    assert "has not answered" in drafter.receive_shutdown().reason
    assert Peer(harness, "draft", 10).hello("studio") == welcome("studio")


def test_joined_drafter_that_reports_its_end_is_lost_at_once_and_frees_its_name(harness: PoolHarness) -> None:
    harness.worker("target-0")
    drafter = Peer(harness, "draft", 9)
    assert drafter.hello("studio") == welcome("studio")
    drafter.send(Fault(None, "it was stopped"))
    while not (losses := harness.losses()):
        harness.listen()
    assert losses[0].gone and losses[0].why == "draft worker studio has left: 'it was stopped'"
    assert Peer(harness, "draft", 10).hello("studio") == welcome("studio")


# --- deaths and restarts -------------------------------------------------------------------------------------------


def kill(harness: PoolHarness, name: str) -> list[WorkerLoss]:
    harness.spawned[name][1].code = -9
    return harness.losses()


def wait(harness: PoolHarness, seconds: float) -> list[WorkerLoss]:
    harness.seconds += seconds
    return harness.losses()


@pytest.mark.parametrize("name", ["target-0", "draft-0"])
def test_dead_worker_is_restarted_in_its_place(harness: PoolHarness, name: str) -> None:
    for each in ("target-0", "draft-0"):
        harness.worker(each, KvCost(100, 7))
    first, budget = harness.spawned[name][0], harness.pool.kv_budget
    assert [(loss.why, loss.gone, loss.fatal) for loss in kill(harness, name)] == [
        (f"{name.partition('-')[0]} worker {name} ended with code -9", True, False)
    ]
    assert harness.states()[name] == "restarting" and harness.starts == ["target-0", "draft-0"]
    assert wait(harness, 0.25) == [] and harness.starts[2:] == [name] and harness.spawned[name][0] != first
    assert (
        harness.states()[name] == "restarting"
        and harness.pool.target_context == 100
        and harness.pool.kv_budget == budget
    )
    assert harness.has_target is harness.ready is (name != "target-0")
    harness.arrived.clear()
    harness.worker(name)
    assert harness.losses() == [] and harness.arrived == [name] and harness.ready
    assert {worker.name: worker.restarts for worker in harness.pool.stats()}[name] == 1


@pytest.mark.parametrize(
    ("code", "address_space", "container", "cause"),
    [
        (-11, 512 << 20, "max", ", most likely out of memory (ulimit -v allows a process 0.5 GiB)"),
        (-6, 512 << 20, "max", ", most likely out of memory (ulimit -v allows a process 0.5 GiB)"),
        (-9, -1, str(3 << 29), ", most likely out of memory (this container or service is allowed 1.5 GiB)"),
        (-11, -1, str(3 << 29), ""),
        (-9, -1, "max", ""),
        (1, 512 << 20, str(3 << 29), ""),
    ],
)
def test_crash_under_a_memory_limit_names_the_limit(
    harness: PoolHarness,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: int,
    address_space: int,
    container: str,
    cause: str,
) -> None:
    (tmp_path / "memory.max").write_text(container)
    monkeypatch.setattr(system, "likely_cause", partial(LIKELY_CAUSE, groups=tmp_path))
    monkeypatch.setattr("resource.getrlimit", lambda _: (address_space, address_space))
    harness.worker("target-0")
    harness.spawned["target-0"][1].code = code
    assert [loss.why for loss in harness.losses()] == [f"target worker target-0 ended with code {code}{cause}"]


@pytest.mark.parametrize(
    "words",
    [
        "std::bad_alloc",
        "libmlx.so: cannot allocate memory for thread-local data: ABORT",
        "ImportError: onnxruntime.so: failed to map segment from shared object",
    ],
)
def test_refused_memory_at_the_end_of_the_log_names_the_limit(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (512 << 20, 512 << 20))
    assert LIKELY_CAUSE(127, words) == "most likely out of memory (ulimit -v allows a process 0.5 GiB)"
    assert LIKELY_CAUSE(127, "no such file") == ""


def test_worker_that_can_start_no_thread_names_the_limit(harness: PoolHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error leaves out the traceback in its log."""
    monkeypatch.setattr(system, "likely_cause", LIKELY_CAUSE)
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    harness.worker("target-0")
    _, spawned = harness.spawned["target-0"]
    spawned.code, spawned.tail = 1, 'File "threading.py" | start() | RuntimeError: can\'t start new thread'
    (loss,) = harness.losses()
    assert loss.why == (
        "target worker target-0 ended with code 1, most likely out of processes or threads; raise their limit"
        " (ulimit -u): RuntimeError: can't start new thread"
    )


def test_messages_to_a_loading_worker_are_not_kept(harness: PoolHarness) -> None:
    harness.worker("target-0")
    kill(harness, "target-0")
    wait(harness, 0.25)
    loading = Peer(harness, "target", harness.spawned["target-0"][0])
    loading.send(Loading("reading weights"))
    harness.settle()
    harness.pool.send_target(Close("r"))
    harness.pool.flush()
    assert loading.drain() == []


def test_restart_delay_doubles_and_the_fifth_death_is_fatal(harness: PoolHarness) -> None:
    harness.worker("target-0")
    for wait_s in (0.25, 0.5, 1.0, 2.0):
        assert [loss.fatal for loss in kill(harness, "target-0")] == [False]
        before = len(harness.starts)
        wait(harness, wait_s - 0.01)
        assert len(harness.starts) == before
        wait(harness, 0.01)
        assert len(harness.starts) == before + 1
    (last,) = kill(harness, "target-0")
    assert last.fatal and "died 5 times in a row" in last.why and harness.states()["target-0"] == "lost"
    before = len(harness.starts)
    wait(harness, 1000)
    assert len(harness.starts) == before


@pytest.mark.parametrize("code", [-9, 1])
@pytest.mark.parametrize("role", ["draft", "prefill"])
def test_draft_and_prefill_workers_are_restarted_without_limit(
    make_harness: Callable[..., PoolHarness], monkeypatch: pytest.MonkeyPatch, role: str, code: int
) -> None:
    """However they die, and even before they have worked for a request. The delay between two starts is bounded."""
    harness, name = make_harness(prefill_workers=1), f"{role}-0"
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: int(harness.seconds * SECOND_NS) + 1)
    for each in ("target-0", "draft-0", "prefill-0"):
        harness.worker(each)
    for wait_s in (0.25, 0.5, 1, 2, 4, 8, 16, 32, *[60] * 40):
        harness.spawned[name][1].code = code
        (loss,) = harness.losses()
        assert not loss.fatal and harness.has_target and harness.states()[name] == "restarting"
        before = len(harness.starts)
        wait(harness, wait_s - 0.01)
        assert len(harness.starts) == before
        wait(harness, 0.01)
        assert harness.starts[before:] == [name]
        harness.worker(name)
    assert "died 48 times in a row, and the next start is in 60 s" in loss.why
    assert harness.ready and harness.pool.notes() == []


def fail_loading(harness: PoolHarness, *, reason: str, code: int = 3, times: int = 1) -> list[WorkerLoss]:
    losses: list[WorkerLoss] = []
    for _ in range(times):
        wait(harness, 60)
        Peer(harness, "draft", harness.spawned["draft-0"][0]).send(Fault(None, reason))
        harness.settle()
        harness.spawned["draft-0"][1].code = code
        losses += harness.losses()
    return losses


def test_drafter_with_repeated_identical_load_failures_is_given_up(harness: PoolHarness) -> None:
    harness.worker("target-0")
    harness.worker("draft-0")
    kill(harness, "draft-0")
    assert not any(loss.fatal for loss in fail_loading(harness, reason="no model at /x", times=4))
    assert harness.states()["draft-0"] == "restarting"
    (last,) = fail_loading(harness, reason="no model at /x")
    assert not last.fatal and harness.states()["draft-0"] == "lost" and harness.has_target
    assert last.why == "no model at /x; it died 6 times in a row, and it is not started again"
    assert harness.pool.notes() == [f"no draft model: {last.why}"] and harness.ready
    before = len(harness.starts)
    wait(harness, 1000)
    assert len(harness.starts) == before


def test_killed_or_differing_load_failures_are_retried(harness: PoolHarness) -> None:
    harness.worker("target-0")
    harness.worker("draft-0")
    kill(harness, "draft-0")
    fail_loading(harness, reason="no memory", times=4)
    fail_loading(harness, reason="no model at /x", times=4)
    fail_loading(harness, reason="no model at /x", code=-9, times=8)
    assert harness.states()["draft-0"] == "restarting"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("target-0", Outcome("r", 0, 0, 1, 0, 1, Span(0, 1))),
        ("draft-0", Drafted("r", 0, 0, 1, (1,), Span(0, 1))),
        ("prefill-0", PromptKv("r", 0, 0, 1, np.zeros(4, np.uint8))),
    ],
)
def test_work_between_deaths_resets_the_death_count(
    make_harness: Callable[..., PoolHarness], name: str, work: Message
) -> None:
    harness = make_harness(prefill_workers=1)
    worker = harness.worker(name)
    for _ in range(12):
        worker.send(work)
        harness.settle()
        assert [loss.fatal for loss in kill(harness, name)] == [False]
        wait(harness, 0.25)
        worker = harness.worker(name)


def test_a_minute_alive_resets_the_death_count(harness: PoolHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: int(harness.seconds * SECOND_NS) + 1)
    harness.worker("target-0")
    for _ in range(12):
        wait(harness, 61)
        assert [loss.fatal for loss in kill(harness, "target-0")] == [False]
        wait(harness, 0.25)
        harness.worker("target-0")


def test_failed_process_start_counts_as_a_death(harness: PoolHarness) -> None:
    harness.worker("target-0").send(Outcome("r", 0, 0, 1, 0, 1, Span(0, 1)))
    harness.settle()
    kill(harness, "target-0")
    harness.fails_to_start = True
    losses = [loss for _ in range(6) for loss in wait(harness, 10)]
    assert [loss.fatal for loss in losses] == [False] * 3 + [True] and "no process can be started" in losses[-1].why


def test_worker_is_not_restarted_before_its_old_process_ends(harness: PoolHarness) -> None:
    harness.worker("target-0")
    harness.pass_time(LOST_AFTER_PINGS)
    harness.spawned["target-0"][1].code = None
    wait(harness, 10)
    assert harness.starts.count("target-0") == 1
    harness.spawned["target-0"][1].code = -9
    wait(harness, 0)
    assert harness.starts.count("target-0") == 2


def test_restarted_worker_with_another_model_is_refused(harness: PoolHarness) -> None:
    harness.worker("target-0")
    kill(harness, "target-0")
    wait(harness, 0.25)
    other = Peer(harness, "target", harness.spawned["target-0"][0])
    answer = other.hello("target-0", context=99)
    assert isinstance(answer, Shutdown) and "came back with another model" in answer.reason
    assert not harness.has_target and harness.pool.target_context == 100
    assert "came back with another model" in kill(harness, "target-0")[0].why


@pytest.mark.parametrize("reads", ["head b at 1,2 of m", ""])
@pytest.mark.parametrize("first", ["target-0", "draft-0"])
def test_head_with_mismatched_target_features_is_refused(harness: PoolHarness, first: str, reads: str) -> None:
    """Whichever of the two is ready first. A drafter that reads no features is accepted."""
    for name in (first, *{"target-0", "draft-0"} - {first}):
        role = name.removesuffix("-0")
        peer = Peer(harness, role, harness.spawned[name][0])
        peer.hello(name, features="head a at 1,2 of m" if role == "target" else reads)
    losses = harness.pool.losses(clock.now())
    assert harness.states()["draft-0"] == ("refused" if reads else "ready")
    assert ["expected the same head and the same model on both sides" in loss.why for loss in losses] == [True] * bool(
        reads
    )
    assert harness.ready


def test_dismissed_head_learns_the_reason_when_it_comes_back(harness: PoolHarness) -> None:
    remote = Peer(harness, "draft", 9)
    assert remote.hello("studio", features="head b at 1,2 of m") == welcome("studio")
    target = Peer(harness, "target", harness.spawned["target-0"][0])
    target.hello("target-0", features="head a at 1,2 of m")
    [loss] = harness.losses()
    assert "expected the same head" in loss.why and remote.receive_shutdown().reason == loss.why
    assert harness.arrived == ["target-0"], "requests do not use it"
    again = remote.hello("studio")
    assert isinstance(again, Shutdown) and loss.why in again.reason
    other = Peer(harness, "draft", 10).hello("mini", features="head b at 1,2 of m")
    assert isinstance(other, Shutdown) and "expected the same head" in other.reason


def test_joined_drafter_is_not_restarted(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    assert Peer(harness, "draft", 9).hello("studio") == welcome("studio")
    harness.pass_time(LOST_AFTER_PINGS, target)
    wait(harness, 100)
    assert harness.states()["studio"] == "lost" and "studio" not in harness.starts


def test_unprintable_model_in_hello_is_refused_and_not_logged(
    harness: PoolHarness, caplog: pytest.LogCaptureFixture
) -> None:
    for incarnation, model in enumerate(("m\n2026 orchestrator ERROR all is lost", "\x1b[2J")):
        refusal = Peer(harness, "draft", incarnation).hello("x", model=model)
        assert isinstance(refusal, Shutdown) and "is not printable" in refusal.reason
    assert all(record.getMessage().isprintable() for record in caplog.records)


# --- invalid messages ---------------------------------------------------------------------------------------------


def invalid_counts(harness: PoolHarness, name: str) -> dict[str, int]:
    return next((worker.invalid_messages for worker in harness.pool.stats() if worker.name == name), {})


def test_joined_drafter_with_too_many_invalid_messages_is_dismissed(harness: PoolHarness) -> None:
    harness.worker("target-0")
    invalid_peer = Peer(harness, "draft", 7)
    assert invalid_peer.hello("studio") == welcome("studio")
    for _ in range(MAX_INVALID_MESSAGES - 1):
        harness.pool.record_invalid("studio", "vocabulary")
    assert harness.losses() == [] and "studio" in harness.pool.drafters()
    invalid_peer.socket.send(b"\xc1 no message")
    harness.settle()
    assert invalid_counts(harness, "studio") == {"vocabulary": MAX_INVALID_MESSAGES - 1, "frame": 1}
    [loss] = harness.losses()
    assert loss.gone and not loss.fatal and "tokens outside its own vocabulary (7)" in loss.why
    assert harness.pool.drafters() == set() and harness.losses() == []
    assert invalid_peer.receive() == Shutdown(loss.why)
    again = invalid_peer.hello("other")
    assert isinstance(again, Shutdown) and loss.why in again.reason
    invalid_peer.send(Resync("r", 0))
    harness.settle()
    assert harness.received == []
    assert Peer(harness, "draft", 8).hello("studio") == welcome("studio")


def test_own_drafter_with_too_many_invalid_messages_is_not_restarted(harness: PoolHarness) -> None:
    harness.worker("target-0"), harness.worker("draft-0")
    assert harness.ready
    for _ in range(MAX_INVALID_MESSAGES):
        harness.pool.record_invalid("draft-0", "round")
    [loss] = harness.losses()
    assert loss.gone and not loss.fatal and harness.spawned["draft-0"][1].killed
    harness.seconds += 3600
    assert harness.losses() == [] and harness.starts.count("draft-0") == 1
    assert harness.states()["draft-0"] == "refused" and "unknown rounds" in harness.pool.notes()[0]


def test_invalid_messages_of_the_target_are_only_counted(harness: PoolHarness) -> None:
    target = harness.worker("target-0")
    for _ in range(2 * MAX_INVALID_MESSAGES):
        target.socket.send(b"")
    harness.settle()
    assert invalid_counts(harness, "target-0") == {"frame": 2 * MAX_INVALID_MESSAGES}
    assert harness.losses() == [] and harness.states()["target-0"] == "ready"


# --- floods -------------------------------------------------------------------------------------------------------


def test_flooding_stranger_is_rate_limited_and_others_are_served(
    harness: PoolHarness, caplog: pytest.LogCaptureFixture
) -> None:
    target, stranger = harness.worker("target-0"), Peer(harness, "draft", 9)
    read: list[object] = []
    decoded = harness.pool._decode
    harness.pool._decode = lambda *sent: read.append(sent) or decoded(*sent)  # type: ignore
    for _ in range(1000):
        stranger.send(Resync("r", 0))
    target.send(Resync("r", 0))
    harness.settle()
    assert harness.received == [("target-0", Resync("r", 0))]
    assert len(read) < 500 and harness.pool.rejected == 1000
    assert {record.getMessage() for record in caplog.records if record.levelname == "WARNING"} == {
        "an unknown peer sends too many messages to the workers' socket; dropping more than 10 a second"
    }


def test_flooding_drafter_is_dismissed(harness: PoolHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.worker("target-0")
    monkeypatch.setattr(harness.pool, "_drafters", RateLimiter(Rate(1e-6, 100)))
    flooding = Peer(harness, "draft", 9)
    flooding.hello("studio")
    for _ in range(200):
        flooding.send(Resync("r", 0))
    harness.settle()
    assert 90 < len(harness.received) <= 100
    [loss] = harness.losses()
    assert "too many messages (8)" in loss.why


def test_prefill_worker_may_send_a_prompt_as_fast_as_its_link_carries_it(
    harness: PoolHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MB counts as 61 messages, so a cached prompt of 1 GB would be a flood, and its rest would be lost."""
    monkeypatch.setattr(harness.pool, "_drafters", RateLimiter(Rate(1e-6, 100)))
    reader = Peer(harness, "prefill", 9)
    reader.hello("studio")
    for start in range(200):
        reader.send(PromptKv("r", 0, start, 1, np.zeros(20_000, np.uint8)))
    harness.settle()
    assert [message.start for _, message in harness.received if isinstance(message, PromptKv)] == list(range(200))
    assert not harness.losses() and not harness.pool.rejected


def test_unread_messages_are_bounded_with_one_warning(
    make_harness: Callable[..., PoolHarness], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.orchestrator.core.worker_pool.MAX_QUEUED_MESSAGES", 4)
    monkeypatch.setattr("outrider.orchestrator.sockets.WARNING_RATE", Rate(1e-6, 1))
    harness = make_harness()
    slow_reader = harness.worker("target-0")
    slow_reader.socket.setsockopt(zmq.RCVHWM, 4)
    for _ in range(100):  # more than the system buffers for a socket
        harness.pool.send_target(Shutdown("x" * 1_000_000))
        harness.pool.flush()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a worker has 4 unread messages, the maximum; later ones are lost"
    ]


# --- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0.5, 3.0], ids=["that has run half as long", "that has run three times as long"])
def test_work_times_of_a_remote_drafter_use_the_local_clock(harness: PoolHarness, times: float) -> None:
    harness.worker("target-0")
    remote, ahead_ns = Peer(harness, "draft", 77), int((times - 1) * clock.now())
    assert remote.hello("studio") == welcome("studio")

    def worked(at_ns: int) -> Span:
        """Sends work of 5 ms that ended at `at_ns`, with times by the remote clock. Returns it as received."""
        remote.send(Branches("r", 0, 0, 1, (), Span(at_ns + ahead_ns - 5_000_000, at_ns + ahead_ns)))
        harness.settle()
        _, message = harness.received[-1]
        assert isinstance(message, Branches)
        return message.work

    before_ns = clock.now()
    work = worked(before_ns)
    assert before_ns <= work.ended_ns <= clock.now() and work.ended_ns - work.started_ns == 5_000_000
    for ping in range(1, 4):
        harness.pool.ping(ping * SECOND_NS)
        remote.answer(ping, ahead_ns=ahead_ns)
    known = harness.pool._registry.named("studio")
    assert known is not None and known.clock.round_trip_ns > 0
    did_ns = clock.now()
    assert abs(worked(did_ns).ended_ns - did_ns) <= known.clock.round_trip_ns + 1000


def test_work_times_of_a_local_worker_are_not_converted(harness: PoolHarness) -> None:
    draft = harness.worker("draft-0")
    harness.pool.ping(SECOND_NS)
    draft.answer(1, ahead_ns=SECOND_NS)
    draft.send(Branches("r", 0, 0, 1, (), Span(5, 6)))
    harness.settle()
    assert harness.received[-1][1] == Branches("r", 0, 0, 1, (), Span(5, 6))


@pytest.mark.parametrize(
    ("target_format", "number_format", "files", "why"),
    [
        ("int8-avx2", "int8-avx2", "f", ""),
        ("int8-avx2", "int8-arm64", "f", "expected --cpu-kernels mlx on both, or CPUs of one kind"),
        ("int8-avx2", "int8-avx2", "g", "expected the same files on both"),
        ("float32", "int8-arm64", "f", ""),
        ("float32", "", "f", ""),
    ],
)
@pytest.mark.parametrize("early", [False, True], ids=["after the target", "before the target"])
def test_prompts_of_a_quantized_target_need_the_same_kernels(
    harness: PoolHarness, target_format: str, number_format: str, files: str, why: str, early: bool
) -> None:
    """Another CPU's keys and values differ in bits, and in a quantized forward that may change more than near-ties."""
    target, reader = Peer(harness, "target", harness.spawned["target-0"][0]), Peer(harness, "prefill", 9)
    hellos = [(target, "target-0", "f", target_format), (reader, "studio", files, number_format)]
    for peer, name, own_files, own_format in hellos[:: -1 if early else 1]:
        answer = peer.hello(name, files=own_files, number_format=own_format)
    assert harness.pool.prefill_workers() == (set() if why else {"studio"})
    if why:
        reason = reader.receive_shutdown().reason if early and harness.losses() else answer.reason  # type: ignore[union-attr]
        assert why in reason


def test_prefill_worker_of_a_target_that_must_read_its_prompts_itself_is_dismissed(
    make_harness: Callable[..., PoolHarness],
) -> None:
    harness = make_harness(prefill_workers=1)
    harness.worker("prefill-0")
    Peer(harness, "target", harness.spawned["target-0"][0]).hello("target-0", abilities=Abilities())
    [loss] = harness.losses()
    assert "prefill-0 is dismissed: the target of this cluster must read its prompts itself" in loss.why
    assert harness.states()["prefill-0"] == "refused" and not harness.pool.prefill_workers()
