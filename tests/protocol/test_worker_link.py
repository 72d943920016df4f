"""A worker's link: a drafter that was started by hand notices that its orchestrator is gone, and joins the next one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from outrider.protocol import worker_link
from outrider.protocol.codec import decode, encode
from outrider.protocol.errors import EndpointError
from outrider.protocol.messages import Close, Fault, Hello, KvMemory, Message, Ping, Pong, Shutdown, Welcome
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.worker_link import OrchestratorGone, WorkerLink, heartbeat_id, routing_id

WAIT_MS = 200_000
HELLO = Hello("draft", "studio", 1, "mlx", "m", 10, 100, 1, 1, incarnation=7)


class Orchestrator:
    """The other end of the workers' socket."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(endpoint)

    def receive(self, kind: type[Message]) -> Message:
        while True:
            assert self.socket.poll(WAIT_MS), f"no {kind.__name__} came"
            message = decode(self.socket.recv_multipart()[1:])
            if isinstance(message, kind):
                return message

    def send(self, message: Message, to: bytes = routing_id(7)) -> None:
        self.socket.send_multipart([to, *encode(message)])

    def ping(self, serial: int) -> None:
        """Pings the worker until it answers, because its heartbeat socket may still be connecting."""
        while True:
            self.send(Ping(serial), heartbeat_id(routing_id(7)))
            if self.socket.poll(50):
                message = decode(self.socket.recv_multipart()[1:])
                if isinstance(message, Pong) and message.serial == serial:
                    return

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint for workers, whose idle polls are shortened. Signal handlers are restored after the test."""
    monkeypatch.setattr(worker_link, "IDLE_POLL_MS", 20)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with PrivateDirectory() as directory:
        yield directory.endpoint("workers")
    for number, handler in before.items():
        signal.signal(number, handler)


def join(endpoint: str, ping_ms: int = 0, kind: type[WorkerLink] = WorkerLink) -> tuple[Orchestrator, WorkerLink]:
    orchestrator, link = Orchestrator(endpoint), kind(endpoint, "studio", incarnation=7)
    welcome = Welcome("studio", ping_ms)
    welcoming = threading.Thread(target=lambda: (orchestrator.receive(Hello), orchestrator.send(welcome)))
    welcoming.start()
    link.enter(HELLO)
    welcoming.join()
    return orchestrator, link


def test_worker_that_is_pinged_waits_for_work_indefinitely(endpoint: str) -> None:
    orchestrator, link = join(endpoint)
    orchestrator.ping(1)

    def work() -> None:
        for serial in range(2, 100):
            orchestrator.ping(serial)
        orchestrator.send(Close("r"))

    asking = threading.Thread(target=work)
    with link:
        asking.start()
        assert link.receive(wait=True) == Close("r")
    asking.join()
    orchestrator.close()


class CountingLink(WorkerLink):
    """Counts how often it has waited without receiving anything since the latest ping."""

    fruitless_waits = 0

    def _count_wait(self) -> None:
        self.fruitless_waits = self.fruitless_waits + 1 if self._pings == self._pings_known else 1
        super()._count_wait()


@pytest.mark.parametrize(("ping_ms", "patience"), [(0, 50), (40, 80)])
def test_worker_patience_follows_the_welcome_and_not_an_earlier_pause(
    endpoint: str, ping_ms: int, patience: int
) -> None:
    """A long gap between two pings, as after a network failure, does not delay the detection of the next failure."""
    orchestrator, link = join(endpoint, ping_ms, CountingLink)
    with link:
        orchestrator.ping(1)
        later = threading.Timer(30 * 0.02, orchestrator.ping, (2,))
        later.start()
        while link._pings < 2:  # type: ignore[attr-defined]
            link._fetch(wait=True)
        with pytest.raises(OrchestratorGone, match="no longer answers"):
            link.receive(wait=True)
        assert link.fruitless_waits == patience  # type: ignore[attr-defined]
    later.join()
    orchestrator.close()


def test_worker_notices_a_lost_orchestrator_and_joins_the_next(endpoint: str) -> None:
    first, link = join(endpoint)
    with link:
        first.ping(1)
        first.close()
        with pytest.raises(OrchestratorGone, match="no longer answers"):
            link.receive(wait=True)
        second = Orchestrator(endpoint)
        welcoming = threading.Thread(target=lambda: (second.receive(Hello), second.send(Welcome("draft-1"))))
        welcoming.start()
        link.enter(HELLO)
        welcoming.join()
        assert link.name == "draft-1"
        second.ping(1)
        second.send(Close("r"))
        assert link.receive(wait=True) == Close("r")
    second.close()


def test_worker_rejoins_an_orchestrator_that_was_only_paused(endpoint: str) -> None:
    """It answers each HELLO that came meanwhile."""
    orchestrator, link = join(endpoint)
    with link:
        orchestrator.ping(1)
        with pytest.raises(OrchestratorGone):
            link.receive(wait=True)

        def resume() -> None:
            for _ in range(2):
                orchestrator.receive(Hello)
            for answer in (Welcome("studio"), KvMemory(1), Welcome("studio"), Close("r")):
                orchestrator.send(answer)

        resuming = threading.Thread(target=resume)
        resuming.start()
        link.enter(HELLO)
        resuming.join()
        assert [link.receive(wait=True), link.receive(wait=True)] == [KvMemory(1), Close("r")]
    orchestrator.close()


def test_worker_joins_if_its_first_hello_was_lost(endpoint: str) -> None:
    """As when the link broke after the worker had loaded its model."""
    orchestrator, link = Orchestrator(endpoint), WorkerLink(endpoint, "studio")
    hello = replace(HELLO, incarnation=link.incarnation)

    def welcome() -> None:
        for _ in range(2):
            orchestrator.receive(Hello)
        orchestrator.send(Welcome("draft-1"), routing_id(link.incarnation))

    welcoming = threading.Thread(target=welcome, daemon=True)
    welcoming.start()
    with link:
        link.enter(hello)
    assert link.name == "draft-1"
    welcoming.join()
    orchestrator.close()


def test_worker_with_a_parent_of_its_own_notices_a_lost_orchestrator(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fleet's drafter, which ends with an actor on its own host."""
    monkeypatch.setattr(worker_link, "end_with_parent", lambda fd: None)
    orchestrator = Orchestrator(endpoint)
    with WorkerLink(endpoint, "studio", parent_fd=0) as link:

        def welcome() -> None:
            orchestrator.receive(Hello)  # as if the first one were lost
            orchestrator.receive(Hello)
            orchestrator.send(Welcome("studio"), routing_id(link.incarnation))

        welcoming = threading.Thread(target=welcome, daemon=True)
        welcoming.start()
        link.enter(replace(HELLO, incarnation=link.incarnation))
        welcoming.join()
        with pytest.raises(OrchestratorGone, match="no longer answers"):
            link.receive(wait=True)
    orchestrator.close()


def test_dismissed_worker_raises_orchestrator_gone(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    orchestrator, link = join(endpoint)
    with link:
        orchestrator.send(Shutdown("it has not answered for 10 s"))
        with pytest.raises(OrchestratorGone, match="dismissed this worker: it has not answered"):
            link.receive(wait=True)
    assert "dismissed" not in caplog.text  # whoever catches the exception reports it
    orchestrator.close()


def test_shutdown_without_a_reason_is_received_as_shutdown(endpoint: str) -> None:
    orchestrator, link = join(endpoint)
    with link:
        orchestrator.send(Shutdown())
        assert link.receive(wait=True) == Shutdown()
    orchestrator.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_worker_reports_its_end(endpoint: str, number: signal.Signals) -> None:
    orchestrator, link = join(endpoint)
    with pytest.raises(SystemExit), link:
        signal.raise_signal(number)
        link.receive(wait=True)
    assert orchestrator.receive(Fault) == Fault(None, "it was stopped")
    orchestrator.close()


def test_worker_gives_up_when_no_orchestrator_answers(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "MAX_REJOIN_POLLS", 20)
    orchestrator, link = join(endpoint)
    with link:
        orchestrator.close()
        with pytest.raises(OrchestratorGone):
            link.receive(wait=True)
        with pytest.raises(EndpointError, match="no answer from"):
            link.enter(HELLO)
