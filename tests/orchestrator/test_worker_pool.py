"""Workers that are accepted, refused, frozen or lost; over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec import structs

from outrider.orchestrator.core import supervisor
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import (
    MAX_WORKERS,
    MOST_INVALID,
    QUIET,
    SILENT,
    SLACK,
    UNKNOWN,
    WorkerLoss,
    reads_alike,
)
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.sockets import Rate, RateLimiter
from outrider.protocol import clock
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode, encode
from outrider.protocol.digest import digest
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import (
    Abilities,
    Branches,
    Close,
    Fault,
    Hello,
    Loading,
    Message,
    Outcome,
    Ping,
    Pong,
    Resync,
    Shutdown,
    Span,
    Welcome,
)
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.stats import KvCost
from outrider.protocol.worker_link import heartbeat_of, routing_id

WAIT_MS = 200_000

LIKELY_CAUSE = system.likely_cause


class Spawned:
    """A process that this cluster started, as far as the pool knows."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def exit_code(self) -> int | None:
        return self.code

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        self.killed, self.code = True, -9

    def terminate(self) -> None: ...

    def watch(self, exits: object) -> None: ...

    def forget_exit(self) -> None: ...

    def wait(self, grace: float) -> int:
        return 0


class Counted(zmq.Socket[bytes]):
    """Counts the messages that it has `sent`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["sent"] = 0

    def send(self, data: Any, flags: int = 0, **options: Any) -> Any:  # type: ignore[override]
        self.__dict__["sent"] += not flags & zmq.SNDMORE
        return super().send(data, flags, **options)


class Peer:
    """A process on the workers' socket, with the routing id of `incarnation` unless it takes another."""

    def __init__(self, hall: Hall, role: str, incarnation: int, identity: bytes | None = None) -> None:
        self.hall, self.role, self.incarnation, self.kv = hall, role, incarnation, KvCost()
        self.hot = hall.dealer(identity or routing_id(incarnation))
        self.beat = hall.dealer(heartbeat_of(identity or routing_id(incarnation)))

    def say(self, message: Message) -> None:
        self.hot.send_multipart(encode(message))

    def hello(
        self, name: str = "", model: str = "m", context: int = 100, files: str = "", features: str = ""
    ) -> Message:
        who = (self.role, name, self.incarnation, 1, "mlx", model, 10, context, 1, 1000)
        self.say(Hello(*who, kv=self.kv, files=files, features=features))
        return self.hear()

    def hear(self) -> Message:
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.hot.poll(5):
            self.hall.listen()
            assert time.monotonic() < deadline, "nothing came"
        return decode(self.hot.recv_multipart())

    def hear_farewell(self) -> Shutdown:
        while not isinstance(message := self.hear(), Shutdown):
            pass
        return message

    def heard(self) -> list[Message]:
        """What is there, where nothing should be."""
        return [decode(self.hot.recv_multipart()) for _ in iter(lambda: self.hot.poll(50), 0)]

    def answer(self, progress: int = 0, expected_ms: int = 0, ahead_ns: int | None = None) -> None:
        """Answers pings up to the latest, and waits until the pool has heard it. `ahead_ns`: its clock, if it tells."""
        latest, serial = self.hall.pool._ping_serial, 0
        while serial < latest:
            ping = decode(self.beat.recv_multipart())
            assert isinstance(ping, Ping)
            serial = ping.serial
            clock_ns = 0 if ahead_ns is None else clock.now() + ahead_ns
            self.beat.send_multipart(encode(Pong("", serial, progress, expected_ms, clock_ns)))
        worker = self.hall.pool._registry.at(routing_id(self.incarnation))
        while worker is not None and worker.heartbeat.unanswered:
            assert self.hall.pool.socket.poll(WAIT_MS)
            self.hall.listen()


def welcome(name: str) -> Welcome:
    """What a cluster with the default of patience says."""
    return Welcome(name, ping_ms=250)


class Hall:
    """A pool whose processes are played, and its clock."""

    def __init__(self, directory: Path, settings: ServeSettings) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.pool = WorkerPool(self.context, settings, directory)
        self.read, self._received = 0, self.pool.router.arrived
        self.pool.router.arrived = self._receive  # type: ignore[method-assign]
        self.dealers: list[Counted] = []
        self.said: list[tuple[str, Message]] = []
        self.spawned: dict[str, tuple[int, Spawned]] = {}
        self.starts: list[str] = []
        self.arrived: list[str] = []
        self.refuses = False
        self.seconds = 0.0

    def spawn(self, role: str, name: str, endpoint: str, settings: object, run_dir: object, incarnation: int) -> Any:
        if self.refuses:
            raise WorkerError("no process can be started")
        self.starts.append(name)
        self.spawned[name] = (incarnation, Spawned())
        return self.spawned[name][1]

    def dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER, socket_class=Counted)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self.pool.endpoint)
        self.dealers.append(socket)
        return socket

    def listen(self) -> None:
        self.said += self.pool.receive()

    def settle(self) -> None:
        """Until all has come that was said."""
        while self.read < sum(dealer.sent for dealer in self.dealers):
            assert self.pool.socket.poll(WAIT_MS), "what was said has not come"
            self.listen()

    def _receive(self) -> Iterator[Any]:
        for one in self._received():
            self.read += 1
            yield one

    def worker(self, name: str, kv: KvCost | None = None) -> Peer:
        """The process that was spawned by this name, ready."""
        peer = Peer(self, name.partition("-")[0], self.spawned[name][0])
        peer.kv = kv or peer.kv
        assert peer.hello(name) == Welcome(name, round(1000 * self.pool.seconds_a_ping))
        return peer

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.pool.stats()}

    def losses(self) -> list[WorkerLoss]:
        self.arrived += [worker.name for worker in self.pool.arrivals()]
        return self.pool.losses(int(self.seconds * SECOND_NS))

    def pass_time(self, pings: int, *answering: Peer, moving: bool = True, expected_ms: int = 0) -> list[WorkerLoss]:
        """Ping after ping, a second apart; who answers, answers each."""
        losses: list[WorkerLoss] = []
        for _ in range(pings):
            self.seconds += 1
            self.pool.ping(int(self.seconds * SECOND_NS))
            for peer in answering:
                peer.answer(int(self.seconds) if moving else 0, expected_ms)
            losses += self.losses()
        return losses

    def close(self) -> None:
        self.pool.close()
        self.context.destroy(linger=0)


@pytest.fixture
def make_hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hall]]:
    halls: list[Hall] = []

    def make(**settings: Any) -> Hall:
        directory = stack.enter_context(PrivateDirectory())
        halls.append(Hall(directory.path, ServeSettings(**settings)))
        monkeypatch.setattr(supervisor, "spawn_worker", halls[-1].spawn)
        # Whatever limits the tests run under.
        monkeypatch.setattr(system, "likely_cause", lambda code, last_words="": "")
        halls[-1].pool.start()
        return halls[-1]

    with ExitStack() as stack:
        yield make
        for hall in halls:
            hall.close()


@pytest.fixture
def hall(make_hall: Callable[..., Hall]) -> Hall:
    return make_hall()


# --- places -------------------------------------------------------------------------------------------------------


def test_a_cluster_is_ready_with_the_workers_it_started(hall: Hall) -> None:
    assert not hall.pool.ready and not hall.pool.has_target()
    hall.worker("target-0")
    hall.worker("draft-0")
    assert hall.pool.ready and hall.pool.has_target() and hall.pool.drafters() == {"draft-0"}


def test_a_cluster_begins_without_a_draft_that_cannot_draft(hall: Hall) -> None:
    draft = Peer(hall, "draft", hall.spawned["draft-0"][0])
    draft.say(Fault("", None, "a llama4 model can't draft", dispensable=True))
    hall.settle()
    assert not hall.pool.ready
    hall.worker("target-0")
    hall.spawned["draft-0"][1].code = 3
    assert hall.pool.ready and hall.losses() == [] and hall.pool.drafters() == set()
    assert hall.pool.notes() == ["no draft model: a llama4 model can't draft"]


def test_any_other_fault_at_the_start_ends_it(hall: Hall) -> None:
    Peer(hall, "draft", hall.spawned["draft-0"][0]).say(Fault("", None, "no model at /x"))
    hall.settle()
    hall.spawned["draft-0"][1].code = 3
    assert [(loss.why, loss.fatal) for loss in hall.losses()] == [("no model at /x", True)]


def test_what_a_target_cannot_do_is_known_from_its_hello(hall: Hall) -> None:
    assert hall.pool.target_abilities == Abilities() and hall.pool.notes() == []
    target = Peer(hall, "target", hall.spawned["target-0"][0])
    able = Abilities(chains=False, why="it decodes token by token")
    target.say(Hello("target", "target-0", target.incarnation, 1, "mlx", "m", 10, 9, 1, 1, abilities=able))
    assert target.hear() == welcome("target-0")
    assert hall.pool.target_abilities == able
    assert hall.pool.notes() == ["speculation is off: it decodes token by token"]


def test_a_stranger_by_the_targets_name_is_turned_away_and_the_target_keeps_its_place(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    cases = [(role, name) for role in ("target", "draft") for name in ("target-0", "draft-0")]
    for serial, (role, name) in enumerate(cases):
        stranger = Peer(hall, role, serial)
        refusal = stranger.hello(name, model="another", context=5)
        assert isinstance(refusal, Shutdown)
        assert ("accepts no other" if role == "target" else f"the name {name} is taken") in refusal.reason
        stranger.say(Resync("r", 0))
    hall.settle()
    assert hall.said == [] and hall.pool.rejected == 8
    assert hall.pool.target_context == 100 and hall.states() == {"target-0": "ready", "draft-0": "ready"}
    hall.pool.send_target(Close("a"))
    hall.pool.send_worker("draft-0", Close("b"))
    hall.pool.flush()
    assert (target.hear(), draft.hear()) == (Close("a"), Close("b"))


@pytest.mark.parametrize("early", [True, False])
def test_a_peer_whose_routing_id_is_a_name_changes_nothing(hall: Hall, early: bool) -> None:
    if not early:
        hall.worker("target-0")
    stray = Peer(hall, "target", 5, identity=b"target-0")
    stray.say(Loading("target", "taking over"))
    stray.say(Fault("target-0", None, "I am broken"))
    stray.beat.send_multipart(encode(Pong("target-0", 0, 1)))
    assert isinstance(stray.hello("target-0"), Shutdown)
    target = hall.worker("target-0") if early else None
    hall.pool.send_target(Close("r"))
    hall.pool.flush()
    assert hall.pool.stage == "" and hall.losses() == [] and stray.heard() == []
    assert target is None or target.hear() == Close("r")


def test_a_place_that_is_held_cannot_be_taken_by_who_knows_its_incarnation(hall: Hall) -> None:
    target = hall.worker("target-0")
    thief = Peer(hall, "target", hall.spawned["target-0"][0])
    thief.say(Hello("target", "target-0", thief.incarnation, 1, "mlx", "another", 10, 5, 1, 1))
    thief.say(Resync("r", 0))
    assert not hall.pool.socket.poll(100)
    hall.pool.send_target(Close("r"))
    hall.pool.flush()
    assert target.hear() == Close("r") and thief.heard() == []
    assert hall.said == [] and hall.pool.target_context == 100


def test_a_hello_said_again_changes_nothing(hall: Hall) -> None:
    target = hall.worker("target-0")
    target.say(Hello("target", "target-0", target.incarnation, 1, "mlx", "another", 10, 5, 1, 1))
    hall.settle()
    assert target.heard() == [] and hall.pool.target_context == 100 and hall.pool.rejected == 1


def test_a_target_joins_a_cluster_that_awaits_one_and_comes_back(
    make_hall: Callable[..., Hall], tmp_path: Path
) -> None:
    """Of the same files only, one at a time, and as the same model; the place keeps what it takes in between."""
    (tmp_path / "config.json").write_text("{}")
    files = digest(tmp_path)
    hall = make_hall(await_target=True, model=str(tmp_path), draft_backend="none")
    assert hall.starts == [] and not hall.pool.ready and hall.pool.endpoint in hall.pool.stage
    other = Peer(hall, "target", 1).hello(files="0123-4567")
    assert isinstance(other, Shutdown) and "expected the same files on both" in other.reason
    first = Peer(hall, "target", 2)
    assert first.hello(files=files + "77") == welcome("target-0") and hall.pool.ready and hall.losses() == []
    second = Peer(hall, "target", 3).hello(files=files + "77")
    assert isinstance(second, Shutdown) and "already has a target" in second.reason
    (loss,) = hall.pass_time(QUIET + SILENT)
    assert loss.gone and not loss.fatal and hall.states() == {"target-0": "restarting"} and not hall.pool.ready
    changed = Peer(hall, "target", 4).hello(files=files + "88")
    assert isinstance(changed, Shutdown) and "came back with another model" in changed.reason
    assert Peer(hall, "target", 5).hello(files=files + "77") == welcome("target-0")
    assert hall.losses() == [] and hall.pool.stats()[0].restarts == 1


def test_a_target_that_does_not_come_back_is_given_up_after_a_while(
    make_hall: Callable[..., Hall], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    hall = make_hall(await_target=True, model=str(tmp_path), draft_backend="none")
    Peer(hall, "target", 1).hello(files=digest(tmp_path))
    assert [loss.fatal for loss in hall.pass_time(QUIET + SILENT)] == [False]
    hall.seconds += supervisor.AWAITED_SECONDS
    (loss,) = hall.losses()
    assert loss.fatal and "none has joined in its place for 10 minutes" in loss.why and hall.losses() == []


def test_a_drafter_joins_by_a_free_name_or_is_given_one(hall: Hall) -> None:
    hall.worker("draft-0")
    assert Peer(hall, "draft", 1).hello("studio") == welcome("studio")
    assert Peer(hall, "draft", 2).hello() == welcome("draft-1")
    assert Peer(hall, "draft", 3).hello() == welcome("draft-2")
    taken = Peer(hall, "draft", 4).hello("studio")
    assert isinstance(taken, Shutdown) and "the name studio is taken" in taken.reason
    assert hall.pool.drafters() == {"draft-0", "studio", "draft-1", "draft-2"}


@pytest.mark.parametrize("name", ["x" * 65, "a\nb", "\x1b[31m"])
def test_a_name_must_be_fit_to_be_shown(hall: Hall, name: str) -> None:
    refusal = Peer(hall, "draft", 1).hello(name)
    assert isinstance(refusal, Shutdown) and "expected at most 64 printable" in refusal.reason


def test_a_hello_from_another_routing_id_than_its_incarnations_is_refused(hall: Hall) -> None:
    refusal = Peer(hall, "draft", 5, identity=b"studio").hello("studio")
    assert isinstance(refusal, Shutdown) and "routing id" in refusal.reason and "studio" not in hall.states()


def test_a_target_that_drafts_for_itself_takes_no_drafter(make_hall: Callable[..., Hall]) -> None:
    refusal = make_hall(colocate=True)
    answer = Peer(refusal, "draft", 1).hello()
    assert isinstance(answer, Shutdown) and "without colocate" in answer.reason


def test_there_are_only_so_many_places(hall: Hall) -> None:
    answers = [Peer(hall, "draft", serial + 1).hello() for serial in range(MAX_WORKERS - 1)]
    assert isinstance(answers[-1], Shutdown) and "the maximum" in answers[-1].reason
    assert all(isinstance(answer, Welcome) for answer in answers[:-1])


def test_what_a_worker_says_before_its_hello_is_about_itself_only(hall: Hall) -> None:
    target = Peer(hall, "target", hall.spawned["target-0"][0])
    target.say(Loading("target", "reading weights"))
    target.say(Fault("target-0", None, "no such file"))
    hall.settle()
    assert hall.pool.stage == "target: reading weights" and hall.pool.news
    hall.spawned["target-0"][1].code = 3
    assert [(loss.why, loss.fatal) for loss in hall.losses()] == [("no such file", True)]


# --- silence ------------------------------------------------------------------------------------------------------


def test_a_server_that_was_stopped_finds_nobody_silent(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    assert hall.pass_time(3, target, draft) == []
    hall.seconds += 100_000
    assert hall.losses() == []
    assert hall.pass_time(3, target, draft) == []
    assert set(hall.states().values()) == {"ready"}


def test_a_silent_drafter_is_done_without_and_welcome_when_it_is_heard_again(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    losses = hall.pass_time(QUIET + 2, target)
    assert [(loss.worker.name, loss.gone) for loss in losses] == [("draft-0", False)]
    assert hall.pool.drafters() == set() and hall.states()["draft-0"] == "frozen"
    assert not hall.spawned["draft-0"][1].killed
    assert hall.pass_time(1, target, draft) == [] and hall.pool.drafters() == {"draft-0"}
    assert hall.pass_time(2 * SILENT, target, draft) == []


def test_a_silent_target_is_waited_for(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    assert hall.pass_time(SILENT - 1, draft) == []
    assert hall.states()["target-0"] == "frozen" and hall.pool.has_target()
    hall.pass_time(1, target, draft)
    assert hall.states()["target-0"] == "ready"


@pytest.mark.parametrize("name", ["target-0", "draft-0"])
def test_who_stays_silent_is_given_up_ended_and_a_stranger_from_then_on(hall: Hall, name: str) -> None:
    peers = {each: hall.worker(each) for each in ("target-0", "draft-0")}
    peers_process = hall.spawned[name][1]
    losses = hall.pass_time(SILENT, *(peer for each, peer in peers.items() if each != name))
    assert losses[-1].worker.name == name and "has not answered for 10 s" in losses[-1].why
    assert hall.states()[name] == "restarting" and peers_process.killed
    peers[name].say(Resync("r", 0))
    peers[name].answer()
    hall.settle()
    assert hall.said == [] and hall.states()[name] == "restarting"


PINGS_A_SECOND = SILENT // 10


@pytest.mark.parametrize(
    ("expected_s", "limit_s"),
    [(0, 10 * UNKNOWN), (0.02, 10), (0.9, 10), (1.5, 1.5 * SLACK), (4, 4 * SLACK)],
    ids=["unknown", "decoding", "a short piece", "a piece of a prompt", "a long one"],
)
def test_a_worker_that_answers_may_stand_still_for_ten_times_what_its_work_should_take(
    hall: Hall, expected_s: float, limit_s: float
) -> None:
    target, limit = hall.worker("target-0"), int(limit_s * PINGS_A_SECOND)
    how = {"moving": False, "expected_ms": int(1000 * expected_s)}
    assert hall.pass_time(limit, target, **how) == []  # type: ignore[arg-type]
    losses = hall.pass_time(1, target, **how)  # type: ignore[arg-type]
    assert [loss.why for loss in losses] == [f"target worker target-0 has made no progress for {limit_s:.0f} s"]


def test_who_moves_between_two_long_operations_is_never_still(hall: Hall) -> None:
    target = hall.worker("target-0")
    for _ in range(3):
        assert hall.pass_time(9 * PINGS_A_SECOND, target, moving=False, expected_ms=20) == []
        assert hall.pass_time(1, target, expected_ms=20) == []


@pytest.mark.parametrize("load_s", [0.5, 3.0])
def test_a_start_may_take_ten_times_what_the_one_before_took_since_its_latest_news(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, load_s: float
) -> None:
    hall.worker("target-0")
    target = hall.pool._registry.named("target-0")
    assert target is not None
    target.begun_ns = target.entered_ns - int(load_s * SECOND_NS)
    kill(hall, "target-0")
    hall.pass_time(1)
    assert hall.starts[2:] == ["target-0"]
    limit = int(max(load_s * SLACK, 10) * PINGS_A_SECOND)
    assert hall.pass_time(limit - 2) == []
    loading = Peer(hall, "target", hall.spawned["target-0"][0])
    loading.say(Loading("target", "reading weights"))
    hall.settle()
    assert hall.pass_time(limit - 1) == []
    assert "has made no progress while starting" in hall.pass_time(2)[0].why


def test_a_first_start_takes_as_long_as_it_takes(hall: Hall) -> None:
    assert hall.pass_time(100 * SILENT) == []


def test_pings_answered_late_and_all_at_once_are_no_standstill(hall: Hall) -> None:
    target = hall.worker("target-0")
    for _ in range(4):
        hall.pass_time(SILENT - 1)
        target.answer(progress=1)
        hall.settle()
        assert [loss for loss in hall.losses() if loss.worker.role == "target"] == []
    assert hall.states()["target-0"] == "ready"


def test_the_limit_is_the_clusters_to_set(make_hall: Callable[..., Hall]) -> None:
    hall = make_hall(worker_timeout=300)
    hall.worker("target-0")
    assert hall.pass_time(290) == []
    assert hall.pass_time(40)[-1].why == "target worker target-0 has not answered for 300 s"


def test_a_joined_drafter_that_was_given_up_is_told_and_its_name_is_free_again(hall: Hall) -> None:
    target = hall.worker("target-0")
    drafter = Peer(hall, "draft", 9)
    assert drafter.hello("studio") == welcome("studio")
    assert hall.pass_time(SILENT, target)[-1].worker.name == "studio"
    assert "has not answered" in drafter.hear_farewell().reason
    assert Peer(hall, "draft", 10).hello("studio") == welcome("studio")


# --- who died and comes back ---------------------------------------------------------------------------------------


def kill(hall: Hall, name: str) -> list[WorkerLoss]:
    hall.spawned[name][1].code = -9
    return hall.losses()


def wait(hall: Hall, seconds: float) -> list[WorkerLoss]:
    hall.seconds += seconds
    return hall.losses()


@pytest.mark.parametrize("name", ["target-0", "draft-0"])
def test_a_worker_that_dies_is_started_again_and_takes_its_place(hall: Hall, name: str) -> None:
    for each in ("target-0", "draft-0"):
        hall.worker(each, KvCost(100, 7))
    first, budget = hall.spawned[name][0], hall.pool.kv_budget
    assert [(loss.why, loss.gone, loss.fatal) for loss in kill(hall, name)] == [
        (f"{name.partition('-')[0]} worker {name} ended with code -9", True, False)
    ]
    assert hall.states()[name] == "restarting" and hall.starts == ["target-0", "draft-0"]
    assert wait(hall, 0.25) == [] and hall.starts[2:] == [name] and hall.spawned[name][0] != first
    assert hall.states()[name] == "restarting" and hall.pool.target_context == 100 and hall.pool.kv_budget == budget
    assert hall.pool.has_target() is (name != "target-0") and hall.pool.ready is False
    hall.arrived.clear()
    hall.worker(name)
    assert hall.losses() == [] and hall.arrived == [name] and hall.pool.ready
    assert {worker.name: worker.restarts for worker in hall.pool.stats()}[name] == 1


@pytest.mark.parametrize(
    ("code", "address_space", "container", "cause"),
    [
        (-11, 512 << 20, "max", ", most likely out of memory (ulimit -v allows a process 0.5 GiB)"),
        (-6, 512 << 20, "max", ", most likely out of memory (ulimit -v allows a process 0.5 GiB)"),
        (-9, -1, str(3 << 29), ", most likely out of memory (this container is allowed 1.5 GiB)"),
        (-11, -1, str(3 << 29), ""),
        (-9, -1, "max", ""),
        (1, 512 << 20, str(3 << 29), ""),
    ],
)
def test_a_crash_under_a_limit_of_memory_names_it(
    hall: Hall,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: int,
    address_space: int,
    container: str,
    cause: str,
) -> None:
    (tmp_path / "memory.max").write_text(container)
    monkeypatch.setattr(system, "likely_cause", partial(LIKELY_CAUSE, bound=tmp_path / "memory.max"))
    monkeypatch.setattr("resource.getrlimit", lambda _: (address_space, address_space))
    hall.worker("target-0")
    hall.spawned["target-0"][1].code = code
    assert [loss.why for loss in hall.losses()] == [f"target worker target-0 ended with code {code}{cause}"]


def test_what_is_said_to_a_worker_that_loads_is_not_kept_for_it(hall: Hall) -> None:
    hall.worker("target-0")
    kill(hall, "target-0")
    wait(hall, 0.25)
    loading = Peer(hall, "target", hall.spawned["target-0"][0])
    loading.say(Loading("target", "reading weights"))
    hall.settle()
    hall.pool.send_target(Close("r"))
    hall.pool.flush()
    assert loading.heard() == []


def test_the_wait_doubles_with_each_death_and_the_fifth_is_the_last(hall: Hall) -> None:
    hall.worker("target-0")
    for wait_s in (0.25, 0.5, 1.0, 2.0):
        assert [loss.fatal for loss in kill(hall, "target-0")] == [False]
        before = len(hall.starts)
        wait(hall, wait_s - 0.01)
        assert len(hall.starts) == before
        wait(hall, 0.01)
        assert len(hall.starts) == before + 1
    (last,) = kill(hall, "target-0")
    assert last.fatal and "died 5 times in a row" in last.why and hall.states()["target-0"] == "lost"
    before = len(hall.starts)
    wait(hall, 1000)
    assert len(hall.starts) == before


@pytest.mark.parametrize("code", [-9, 1])
@pytest.mark.parametrize("role", ["draft", "prefill"])
def test_a_worker_that_requests_can_do_without_is_never_given_up(
    make_hall: Callable[..., Hall], monkeypatch: pytest.MonkeyPatch, role: str, code: int
) -> None:
    """Whatever kills it, and before it has worked for a request; the wait between two starts has a bound."""
    hall, name = make_hall(prefill_workers=1), f"{role}-0"
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: int(hall.seconds * SECOND_NS) + 1)
    for each in ("target-0", "draft-0", "prefill-0"):
        hall.worker(each)
    for wait_s in (0.25, 0.5, 1, 2, 4, 8, 16, 32, *[60] * 40):
        hall.spawned[name][1].code = code
        (loss,) = hall.losses()
        assert not loss.fatal and hall.pool.has_target() and hall.states()[name] == "restarting"
        before = len(hall.starts)
        wait(hall, wait_s - 0.01)
        assert len(hall.starts) == before
        wait(hall, 0.01)
        assert hall.starts[before:] == [name]
        hall.worker(name)
    assert "died 48 times in a row, and the next start is in 60 s" in loss.why
    assert hall.pool.ready and hall.pool.notes() == []


def load_fails(hall: Hall, *, says: str, code: int = 3, times: int = 1) -> list[WorkerLoss]:
    losses: list[WorkerLoss] = []
    for _ in range(times):
        wait(hall, 60)
        Peer(hall, "draft", hall.spawned["draft-0"][0]).say(Fault("", None, says))
        hall.settle()
        hall.spawned["draft-0"][1].code = code
        losses += hall.losses()
    return losses


def test_a_drafter_whose_load_fails_alike_again_and_again_is_done_without(hall: Hall) -> None:
    hall.worker("target-0")
    hall.worker("draft-0")
    kill(hall, "draft-0")
    assert not any(loss.fatal for loss in load_fails(hall, says="no model at /x", times=4))
    assert hall.states()["draft-0"] == "restarting"
    (last,) = load_fails(hall, says="no model at /x")
    assert not last.fatal and hall.states()["draft-0"] == "lost" and hall.pool.has_target()
    assert last.why == "no model at /x; it died 6 times in a row, and it is not started again"
    assert hall.pool.notes() == [f"no draft model: {last.why}"] and hall.pool.ready
    before = len(hall.starts)
    wait(hall, 1000)
    assert len(hall.starts) == before


def test_loads_that_are_killed_or_fail_otherwise_are_tried_again(hall: Hall) -> None:
    hall.worker("target-0")
    hall.worker("draft-0")
    kill(hall, "draft-0")
    load_fails(hall, says="no memory", times=4)
    load_fails(hall, says="no model at /x", times=4)
    load_fails(hall, says="no model at /x", code=-9, times=8)
    assert hall.states()["draft-0"] == "restarting"


def test_who_did_something_between_two_deaths_begins_a_new_row(hall: Hall) -> None:
    target = hall.worker("target-0")
    for _ in range(12):
        target.say(Outcome("r", 0, 0, 1, 0, 1, Span(0, 1)))
        hall.settle()
        assert [loss.fatal for loss in kill(hall, "target-0")] == [False]
        wait(hall, 0.25)
        target = hall.worker("target-0")


def test_who_stood_for_a_minute_begins_a_new_row(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: int(hall.seconds * SECOND_NS) + 1)
    hall.worker("target-0")
    for _ in range(12):
        wait(hall, 61)
        assert [loss.fatal for loss in kill(hall, "target-0")] == [False]
        wait(hall, 0.25)
        hall.worker("target-0")


def test_a_process_that_cannot_be_started_has_died_again(hall: Hall) -> None:
    hall.worker("target-0").say(Outcome("r", 0, 0, 1, 0, 1, Span(0, 1)))
    hall.settle()
    kill(hall, "target-0")
    hall.refuses = True
    losses = [loss for _ in range(6) for loss in wait(hall, 10)]
    assert [loss.fatal for loss in losses] == [False] * 3 + [True] and "no process can be started" in losses[-1].why


def test_nobody_is_started_while_something_of_the_one_before_is_left(hall: Hall) -> None:
    hall.worker("target-0")
    hall.pass_time(SILENT)
    hall.spawned["target-0"][1].code = None
    wait(hall, 10)
    assert hall.starts.count("target-0") == 1
    hall.spawned["target-0"][1].code = -9
    wait(hall, 0)
    assert hall.starts.count("target-0") == 2


def test_who_comes_back_with_another_model_is_not_let_in(hall: Hall) -> None:
    hall.worker("target-0")
    kill(hall, "target-0")
    wait(hall, 0.25)
    other = Peer(hall, "target", hall.spawned["target-0"][0])
    answer = other.hello("target-0", context=99)
    assert isinstance(answer, Shutdown) and "came back with another model" in answer.reason
    assert not hall.pool.has_target() and hall.pool.target_context == 100
    assert "came back with another model" in kill(hall, "target-0")[0].why


@pytest.mark.parametrize("reads", ["head b at 1,2 of m", ""])
@pytest.mark.parametrize("first", ["target-0", "draft-0"])
def test_a_head_that_reads_other_rows_than_the_target_makes_is_done_without(hall: Hall, first: str, reads: str) -> None:
    """Whoever of the two is ready first; one that reads none is not concerned."""
    for name in (first, *{"target-0", "draft-0"} - {first}):
        role = name.removesuffix("-0")
        peer = Peer(hall, role, hall.spawned[name][0])
        peer.hello(name, features="head a at 1,2 of m" if role == "target" else reads)
    losses = hall.pool.losses(clock.now())
    assert hall.states()["draft-0"] == ("refused" if reads else "ready")
    assert ["expected the same head and the same model on both sides" in loss.why for loss in losses] == [True] * bool(
        reads
    )
    assert hall.pool.ready


def test_a_drafter_that_joined_by_itself_is_not_started_by_anybody(hall: Hall) -> None:
    target = hall.worker("target-0")
    assert Peer(hall, "draft", 9).hello("studio") == welcome("studio")
    hall.pass_time(SILENT, target)
    wait(hall, 100)
    assert hall.states()["studio"] == "lost" and "studio" not in hall.starts


def test_what_a_stranger_says_of_itself_must_be_fit_to_be_shown(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    for incarnation, model in enumerate(("m\n2026 orchestrator ERROR all is lost", "\x1b[2J")):
        refusal = Peer(hall, "draft", incarnation).hello("x", model=model)
        assert isinstance(refusal, Shutdown) and "is not printable" in refusal.reason
    assert all(record.getMessage().isprintable() for record in caplog.records)


# --- who lies -----------------------------------------------------------------------------------------------------


def lies_of(hall: Hall, name: str) -> dict[str, int]:
    return {tally.name: tally.count for worker in hall.pool.stats() if worker.name == name for tally in worker.lies}


def test_a_joined_drafter_that_lies_too_often_is_sent_away_and_does_not_come_in_again(hall: Hall) -> None:
    hall.worker("target-0")
    liar = Peer(hall, "draft", 7)
    assert liar.hello("studio") == welcome("studio")
    for _ in range(MOST_INVALID - 1):
        hall.pool.record_invalid("studio", "vocabulary")
    assert hall.losses() == [] and "studio" in hall.pool.drafters()
    liar.hot.send(b"\xc1 no message")
    hall.settle()
    assert lies_of(hall, "studio") == {"vocabulary": MOST_INVALID - 1, "frame": 1}
    [loss] = hall.losses()
    assert loss.gone and not loss.fatal and "tokens outside its own vocabulary (7)" in loss.why
    assert hall.pool.drafters() == set() and hall.losses() == []
    assert liar.hear() == Shutdown(loss.why)
    again = liar.hello("other")
    assert isinstance(again, Shutdown) and "sent too many invalid messages" in again.reason
    liar.say(Resync("r", 0))
    hall.settle()
    assert hall.said == []
    assert Peer(hall, "draft", 8).hello("studio") == welcome("studio")


def test_an_own_drafter_that_lies_too_often_is_ended_and_not_started_again(hall: Hall) -> None:
    hall.worker("target-0"), hall.worker("draft-0")
    assert hall.pool.ready
    for _ in range(MOST_INVALID):
        hall.pool.record_invalid("draft-0", "round")
    [loss] = hall.losses()
    assert loss.gone and not loss.fatal and hall.spawned["draft-0"][1].killed
    hall.seconds += 3600
    assert hall.losses() == [] and hall.starts.count("draft-0") == 1
    assert hall.states()["draft-0"] == "refused" and "unknown rounds" in hall.pool.notes()[0]


def test_what_the_target_says_wrongly_is_counted_and_ends_nothing(hall: Hall) -> None:
    target = hall.worker("target-0")
    for _ in range(2 * MOST_INVALID):
        target.hot.send(b"")
    hall.settle()
    assert lies_of(hall, "target-0") == {"frame": 2 * MOST_INVALID}
    assert hall.losses() == [] and hall.states()["target-0"] == "ready"


# --- who says too much --------------------------------------------------------------------------------------------


def test_a_stranger_that_floods_is_not_read_and_disturbs_nobody(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    target, stranger = hall.worker("target-0"), Peer(hall, "draft", 9)
    read: list[object] = []
    decoded = hall.pool._decoded
    hall.pool._decoded = lambda identity, frames: read.append(frames) or decoded(identity, frames)  # type: ignore
    for _ in range(1000):
        stranger.say(Resync("r", 0))
    target.say(Resync("r", 0))
    hall.settle()
    assert hall.said == [("target-0", Resync("r", 0))]
    assert len(read) < 500 and hall.pool.rejected == 1000
    assert {record.getMessage() for record in caplog.records if record.levelname == "WARNING"} == {
        "an unknown peer sends too many messages to the workers' socket; dropping more than 10 a second"
    }


def test_a_drafter_that_floods_is_done_without(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    hall.worker("target-0")
    monkeypatch.setattr(hall.pool, "_drafters", RateLimiter(Rate(1e-6, 100)))
    flooding = Peer(hall, "draft", 9)
    flooding.hello("studio")
    for _ in range(200):
        flooding.say(Resync("r", 0))
    hall.settle()
    assert 90 < len(hall.said) <= 100
    [loss] = hall.losses()
    assert "too many messages (8)" in loss.why


def test_what_a_worker_does_not_read_is_bounded_and_said_once(
    make_hall: Callable[..., Hall], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.orchestrator.core.worker_pool.MOST_WAITING", 4)
    monkeypatch.setattr("outrider.orchestrator.core.worker_pool.WARNINGS", Rate(1e-6, 1))
    hall = make_hall()
    deaf = hall.worker("target-0")
    deaf.hot.setsockopt(zmq.RCVHWM, 4)
    for _ in range(100):  # more than the system keeps for a socket
        hall.pool.send_target(Shutdown("x" * 1_000_000))
        hall.pool.flush()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a worker has 4 unread messages, the maximum; later ones are lost"
    ]


# --- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0.5, 3.0], ids=["that has run half as long", "that has run three times as long"])
def test_what_a_drafter_of_another_machine_did_is_told_by_the_clock_here(hall: Hall, times: float) -> None:
    hall.worker("target-0")
    far, ahead_ns = Peer(hall, "draft", 77), int((times - 1) * clock.now())
    assert far.hello("studio") == welcome("studio")

    def worked(at_ns: int) -> Span:
        """By the clock there; it took 5 ms."""
        far.say(Branches("r", 0, 0, 1, 1, (), Span(at_ns + ahead_ns - 5_000_000, at_ns + ahead_ns)))
        hall.settle()
        _, message = hall.said[-1]
        assert isinstance(message, Branches)
        return message.work

    before_ns = clock.now()
    heard = worked(before_ns)
    assert before_ns <= heard.ended_ns <= clock.now() and heard.ended_ns - heard.started_ns == 5_000_000
    for ping in range(1, 4):
        hall.pool.ping(ping * SECOND_NS)
        far.answer(ping, ahead_ns=ahead_ns)
    known = hall.pool._registry.named("studio")
    assert known is not None and known.clock.round_trip_ns > 0
    did_ns = clock.now()
    assert abs(worked(did_ns).ended_ns - did_ns) <= known.clock.round_trip_ns + 1000


def test_the_clock_of_a_worker_that_was_started_here_is_the_clock_here(hall: Hall) -> None:
    draft = hall.worker("draft-0")
    hall.pool.ping(SECOND_NS)
    draft.answer(1, ahead_ns=SECOND_NS)
    draft.say(Branches("r", 0, 0, 1, 1, (), Span(5, 6)))
    hall.settle()
    assert hall.said[-1][1] == Branches("r", 0, 0, 1, 1, (), Span(5, 6))


def test_prompts_of_a_rounded_target_are_read_by_the_same_kernels_only() -> None:
    """Another CPU's keys and values differ in bits, and a rounded forward has no near-ties."""
    made = Hello(
        "target", "target-0", 1, 1, "mlx", "m", 10, 100, 1, 1, files="f", number_format="int8-onnxruntime-avx2"
    )
    same, other = (
        structs.replace(made, role="prefill"),
        structs.replace(made, role="prefill", number_format="int8-onnxruntime-arm64"),
    )
    assert reads_alike(same, made) and not reads_alike(other, made)
    assert not reads_alike(structs.replace(same, files="g"), made)
    exact = structs.replace(made, number_format="float32")
    assert reads_alike(other, exact) and reads_alike(structs.replace(same, number_format=""), exact)
