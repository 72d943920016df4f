"""Who has a place in the cluster, who is turned away, and who counts as frozen or gone; over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from outrider.orchestrator.core import worker_pool
from outrider.orchestrator.core.places import MAX_WORKERS
from outrider.orchestrator.core.pulse import QUIET, SILENT, STILL
from outrider.orchestrator.core.worker import Loss
from outrider.orchestrator.core.worker_pool import SECOND_NS, WorkerPool
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.abilities import Abilities
from outrider.protocol.codec import decode, encode
from outrider.protocol.directory import private_directory
from outrider.protocol.messages import Close, Fault, Hello, Loading, Message, Ping, Pong, Resync, Shutdown, Welcome
from outrider.protocol.worker_link import heartbeat_of, routing_id

WAIT_MS = 10_000


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
        self.killed = True

    def terminate(self) -> None: ...

    def wait(self, grace: float) -> int:
        return 0


class Peer:
    """A process on the workers' socket, with the routing id of `incarnation` unless it takes another."""

    def __init__(self, hall: Hall, role: str, incarnation: int, identity: bytes | None = None) -> None:
        self.hall, self.role, self.incarnation = hall, role, incarnation
        self.hot = hall.dealer(identity or routing_id(incarnation))
        self.beat = hall.dealer(heartbeat_of(identity or routing_id(incarnation)))

    def say(self, message: Message) -> None:
        self.hot.send_multipart(encode(message))

    def hello(self, name: str = "", model: str = "m", context: int = 100) -> Message:
        self.say(Hello(self.role, name, self.incarnation, 1, "mlx", model, 10, context, 1, 1))
        return self.hear()

    def hear(self) -> Message:
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.hot.poll(5):
            self.hall.listen()
            assert time.monotonic() < deadline, "nothing came"
        return decode(self.hot.recv_multipart())

    def heard(self) -> list[Message]:
        """All that is there by now."""
        return [decode(self.hot.recv_multipart()) for _ in iter(lambda: self.hot.poll(50), 0)]

    def answer(self, progress: int = 0) -> None:
        """Answers pings up to the latest, and waits until the pool has heard it."""
        latest, serial = self.hall.pool._ping_serial, 0
        while serial < latest:
            ping = decode(self.beat.recv_multipart())
            assert isinstance(ping, Ping)
            serial = ping.serial
            self.beat.send_multipart(encode(Pong("", serial, progress)))
        worker = self.hall.pool._places.at(routing_id(self.incarnation))
        while worker is not None and worker.pulse.unanswered:
            assert self.hall.pool.socket.poll(WAIT_MS)
            self.hall.listen()


class Hall:
    """A pool whose processes are played, and its clock."""

    def __init__(self, directory: Path, settings: ServeSettings) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.pool = WorkerPool(self.context, settings, directory)
        self.said: list[tuple[str, Message]] = []
        self.spawned: dict[str, tuple[int, Spawned]] = {}
        self.seconds = 0

    def spawn(self, role: str, name: str, endpoint: str, settings: object, run_dir: object, incarnation: int) -> Any:
        self.spawned[name] = (incarnation, Spawned())
        return self.spawned[name][1]

    def dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self.pool.endpoint)
        return socket

    def listen(self) -> None:
        self.said += self.pool.receive()

    def settle(self) -> None:
        """Until nothing more comes."""
        while self.pool.socket.poll(100):
            self.listen()

    def worker(self, name: str) -> Peer:
        """The process that was spawned by this name, ready."""
        peer = Peer(self, name.partition("-")[0], self.spawned[name][0])
        assert peer.hello(name) == Welcome(name)
        return peer

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.pool.stats()}

    def pass_time(self, seconds: int, *answering: Peer, moving: bool = True) -> list[Loss]:
        """Second after second; who answers, answers each ping."""
        losses: list[Loss] = []
        for _ in range(seconds):
            self.seconds += 1
            self.pool.ping(self.seconds * SECOND_NS)
            for peer in answering:
                peer.answer(self.seconds if moving else 0)
            losses += self.pool.losses()
        return losses

    def close(self) -> None:
        self.pool.close()
        self.context.destroy(linger=0)


@pytest.fixture
def make_hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hall]]:
    halls: list[Hall] = []

    def make(**settings: Any) -> Hall:
        directory = stack.enter_context(private_directory())
        halls.append(Hall(directory.path, ServeSettings(**settings)))
        monkeypatch.setattr(worker_pool, "spawn_worker", halls[-1].spawn)
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
    assert hall.pool.ready and hall.pool.losses() == [] and hall.pool.drafters() == set()
    assert hall.pool.notes() == ["no draft model: a llama4 model can't draft"]


def test_any_other_fault_at_the_start_ends_it(hall: Hall) -> None:
    Peer(hall, "draft", hall.spawned["draft-0"][0]).say(Fault("", None, "no model at /x"))
    hall.settle()
    hall.spawned["draft-0"][1].code = 3
    assert [(loss.why, loss.started) for loss in hall.pool.losses()] == [("no model at /x", False)]


def test_what_a_target_cannot_do_is_known_from_its_hello(hall: Hall) -> None:
    assert hall.pool.target_abilities == Abilities() and hall.pool.notes() == []
    target = Peer(hall, "target", hall.spawned["target-0"][0])
    able = Abilities(chains=False, why="it decodes one by one")
    target.say(Hello("target", "target-0", target.incarnation, 1, "mlx", "m", 10, 9, 1, 1, abilities=able))
    assert target.hear() == Welcome("target-0")
    assert hall.pool.target_abilities == able
    assert hall.pool.notes() == ["speculation is off: it decodes one by one"]


def test_a_stranger_by_the_targets_name_is_turned_away_and_the_target_keeps_its_place(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    cases = [(role, name) for role in ("target", "draft") for name in ("target-0", "draft-0")]
    for serial, (role, name) in enumerate(cases):
        stranger = Peer(hall, role, serial)
        refusal = stranger.hello(name, model="another", context=5)
        assert isinstance(refusal, Shutdown)
        assert ("takes no other" if role == "target" else f"the name {name} is taken") in refusal.reason
        stranger.say(Resync("r", 0))
    hall.settle()
    assert hall.said == [] and hall.pool.rejected == 8
    assert hall.pool.target_context == 100 and hall.states() == {"target-0": "ready", "draft-0": "ready"}
    hall.pool.send_target(Close("a"))
    hall.pool.send_drafter("draft-0", Close("b"))
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
    assert hall.pool.stage == "" and hall.pool.losses() == [] and stray.heard() == []
    assert target is None or target.hear() == Close("r")


def test_a_place_that_is_held_cannot_be_taken_by_who_knows_its_incarnation(hall: Hall) -> None:
    target = hall.worker("target-0")
    thief = Peer(hall, "target", hall.spawned["target-0"][0])
    thief.say(Hello("target", "target-0", thief.incarnation, 1, "mlx", "another", 10, 5, 1, 1))
    thief.say(Resync("r", 0))
    hall.settle()
    hall.pool.send_target(Close("r"))
    hall.pool.flush()
    assert target.hear() == Close("r") and thief.heard() == []
    assert hall.said == [] and hall.pool.target_context == 100


def test_a_hello_said_again_changes_nothing(hall: Hall) -> None:
    target = hall.worker("target-0")
    target.say(Hello("target", "target-0", target.incarnation, 1, "mlx", "another", 10, 5, 1, 1))
    hall.settle()
    assert target.heard() == [] and hall.pool.target_context == 100 and hall.pool.rejected == 1


def test_a_drafter_joins_by_a_free_name_or_is_given_one(hall: Hall) -> None:
    hall.worker("draft-0")
    assert Peer(hall, "draft", 1).hello("studio") == Welcome("studio")
    assert Peer(hall, "draft", 2).hello() == Welcome("draft-1")
    assert Peer(hall, "draft", 3).hello() == Welcome("draft-2")
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
    assert isinstance(answers[-1], Shutdown) and "as many as it takes" in answers[-1].reason
    assert all(isinstance(answer, Welcome) for answer in answers[:-1])


def test_what_a_worker_says_before_its_hello_is_about_itself_only(hall: Hall) -> None:
    target = Peer(hall, "target", hall.spawned["target-0"][0])
    target.say(Loading("target", "reading weights"))
    target.say(Fault("target-0", None, "no such file"))
    hall.settle()
    assert hall.pool.stage == "target: reading weights" and hall.pool.news
    hall.spawned["target-0"][1].code = 3
    assert [(loss.why, loss.started) for loss in hall.pool.losses()] == [("no such file", False)]


# --- silence ------------------------------------------------------------------------------------------------------


def test_a_server_that_was_stopped_finds_nobody_silent(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    assert hall.pass_time(3, target, draft) == []
    hall.seconds += 100_000
    assert hall.pool.losses() == []
    assert hall.pass_time(3, target, draft) == []
    assert set(hall.states().values()) == {"ready"}


def test_a_silent_drafter_is_done_without_and_welcome_when_it_is_heard_again(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    losses = hall.pass_time(QUIET + 2, target)
    assert [(loss.worker.name, loss.started) for loss in losses] == [("draft-0", True)]
    assert hall.pool.drafters() == set() and hall.states()["draft-0"] == "frozen"
    assert not hall.spawned["draft-0"][1].killed
    assert hall.pass_time(1, target, draft) == [] and hall.pool.drafters() == {"draft-0"}
    assert hall.pass_time(STILL, target, draft) == []


def test_a_silent_target_is_waited_for(hall: Hall) -> None:
    target, draft = hall.worker("target-0"), hall.worker("draft-0")
    assert hall.pass_time(SILENT - 1, draft) == []
    assert hall.states()["target-0"] == "frozen" and hall.pool.has_target()
    hall.pass_time(1, target, draft)
    assert hall.states()["target-0"] == "ready"


@pytest.mark.parametrize("name", ["target-0", "draft-0"])
def test_who_stays_silent_is_given_up_ended_and_a_stranger_from_then_on(hall: Hall, name: str) -> None:
    peers = {each: hall.worker(each) for each in ("target-0", "draft-0")}
    losses = hall.pass_time(SILENT, *(peer for each, peer in peers.items() if each != name))
    assert losses[-1].worker.name == name and "has not answered for 30 s" in losses[-1].why
    assert hall.states()[name] == "lost" and hall.spawned[name][1].killed
    peers[name].say(Resync("r", 0))
    peers[name].answer()
    hall.settle()
    assert hall.said == [] and hall.states()[name] == "lost"


def test_a_worker_that_answers_and_does_not_move_is_given_up_in_the_end(hall: Hall) -> None:
    target = hall.worker("target-0")
    losses = hall.pass_time(STILL + 1, target, moving=False)
    assert [loss.why for loss in losses] == [f"target worker target-0 has not moved for {STILL} s"]


def test_pings_answered_late_and_all_at_once_are_no_standstill(hall: Hall) -> None:
    target = hall.worker("target-0")
    for _ in range(4):
        hall.pass_time(SILENT - 1)
        target.answer(progress=1)
        hall.settle()
        assert [loss for loss in hall.pool.losses() if loss.worker.role == "target"] == []
    assert hall.states()["target-0"] == "ready"


def test_the_limit_is_the_clusters_to_set(make_hall: Callable[..., Hall]) -> None:
    hall = make_hall(worker_timeout=300)
    hall.worker("target-0")
    assert hall.pass_time(290) == []
    assert hall.pass_time(20)[-1].why == "target worker target-0 has not answered for 300 s"


def test_a_joined_drafter_that_was_given_up_is_told_and_its_name_is_free_again(hall: Hall) -> None:
    target = hall.worker("target-0")
    drafter = Peer(hall, "draft", 9)
    assert drafter.hello("studio") == Welcome("studio")
    assert hall.pass_time(SILENT, target)[-1].worker.name == "studio"
    farewell = drafter.heard()[-1]
    assert isinstance(farewell, Shutdown) and "has not answered" in farewell.reason
    assert Peer(hall, "draft", 10).hello("studio") == Welcome("studio")
