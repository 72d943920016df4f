"""Drafters on other machines join over real sockets: which are accepted, refused and dismissed, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec import msgpack
from msgspec.structs import replace

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.events import ModelVocabulary
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import worker_link
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.codec import decode, encode
from outrider.protocol.endpoints import connect, probe
from outrider.protocol.errors import KeyFault, WorkerError
from outrider.protocol.keys import DRAFTER, AllowedKey, ClientKeys, KeyPair, Keyring, make_pair
from outrider.protocol.messages import Hello, KvMemory, Message, Resync, Shutdown, Welcome
from outrider.protocol.socket_files import PrivateDirectory
from outrider.protocol.stats import KvCost
from outrider.protocol.worker_link import WorkerLink, routing_id

WAIT_MS = 200_000
MINI, STUDIO = make_pair(), make_pair()
HELLO = Hello("draft", "", 77, "mlx", "m", 10, 100, 1, 1, incarnation=7)


class JoiningPool:
    """A worker pool that drafters join by TCP, with keys."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.ring = Keyring(folder)
        self.ring.make()
        for name, pair in (("mini", MINI), ("studio", STUDIO)):
            self.ring.allow(AllowedKey(DRAFTER, pair.public, name))
        self.context: zmq.Context[Any] = zmq.Context()
        self.auth = CurveAuth(self.context, self.ring)
        settings = ServeSettings(workers_endpoint="tcp://127.0.0.1:0", keyed=True, keys=folder)
        self.pool = WorkerPool(self.context, settings, run_dir, self.auth)
        self.received: list[tuple[str, Message]] = []
        self.sockets: list[zmq.Socket[Any]] = []

    def keys(self, pair: KeyPair) -> ClientKeys:
        return ClientKeys(pair, self.auth.own.public)

    def peer(self, incarnation: int, pair: KeyPair | None) -> zmq.Socket[Any]:
        """Connects by TCP with these keys, or without keys to the server's own endpoint."""
        self.sockets.append(socket := self.context.socket(zmq.DEALER))
        socket.identity = routing_id(incarnation)
        if pair is None:
            connect(socket, self.pool.endpoint)
        else:
            connect(socket, self.pool.joining_endpoint, self.keys(pair))
        return socket

    def hello(self, socket: zmq.Socket[Any], incarnation: int, **fields: Any) -> Message:
        return self.answer(socket, encode(replace(HELLO, incarnation=incarnation, **fields)))

    def answer(self, socket: zmq.Socket[Any], frames: Any) -> Message:
        socket.send_multipart(frames)
        while not socket.poll(5):
            self.listen()
        return decode(socket.recv_multipart())

    def listen(self) -> None:
        self.received += self.pool.receive()

    def tick(self, seconds: int) -> list[str]:
        """Returns the reasons of the losses that are found at this time."""
        self.pool.ping(seconds * SECOND_NS)
        return [loss.why for loss in self.pool.losses(seconds * SECOND_NS)]

    def close(self) -> None:
        self.pool.close()
        self.auth.close()
        self.context.destroy(linger=0)


@pytest.fixture
def joining_pool(tmp_path: Path) -> Iterator[JoiningPool]:
    with PrivateDirectory() as run_dir:
        made = JoiningPool(tmp_path / "keys", run_dir.path)
        yield made
        made.close()


def reason(answer: Message) -> str:
    assert isinstance(answer, Shutdown)
    return answer.reason


def test_remote_drafter_joins_and_its_messages_arrive(joining_pool: JoiningPool) -> None:
    remote = joining_pool.peer(7, MINI)
    answer = joining_pool.hello(remote, 7, name="mini")
    assert isinstance(answer, Welcome) and answer.name == "mini"
    remote.send_multipart(encode(Resync("r", 0)))
    while not joining_pool.received:
        joining_pool.listen()
    assert joining_pool.received == [("mini", Resync("r", 0))]


def test_memory_of_a_remote_drafter_is_not_taken_from_this_machines_texts(joining_pool: JoiningPool) -> None:
    before, most = joining_pool.pool.kv_budget, 2**63 - 1
    remote = joining_pool.peer(7, MINI)
    joining_pool.hello(remote, 7, name="mini", kv=KvCost(most, most), weight_bytes=most)
    assert joining_pool.pool.drafters() == {"mini"}
    assert joining_pool.pool.kv_budget == before and before.limit > 0
    assert decode(remote.recv_multipart()) == KvMemory(most)


def test_drafter_with_a_revoked_key_is_dismissed_for_good(joining_pool: JoiningPool) -> None:
    remote = joining_pool.peer(7, MINI)
    joining_pool.hello(remote, 7, name="mini")
    assert not joining_pool.tick(100)
    joining_pool.ring.revoke("mini")
    (why,) = joining_pool.tick(200)
    assert "mini is dismissed: its key is not allowed" in why and "`outrider keys allow` and --as" in why
    assert "is dismissed" in reason(decode(remote.recv_multipart()[-1:]) if remote.poll(WAIT_MS) else Welcome(""))
    assert "its key is not allowed" in reason(joining_pool.hello(remote, 7, name="mini"))  # by its old connection
    with pytest.raises(KeyFault, match=r"refuses this side's key .* \(`outrider keys allow`, with --as for a worker\)"):
        probe(joining_pool.pool.joining_endpoint, joining_pool.keys(MINI))


def test_key_of_a_drafter_dismissed_for_invalid_messages_is_refused(joining_pool: JoiningPool) -> None:
    remote = joining_pool.peer(7, MINI)
    joining_pool.hello(remote, 7, name="mini")
    for _ in range(1000):
        joining_pool.pool.record_invalid("mini", "frame")
    with pytest.raises(KeyFault, match="refuses this side's key"):
        probe(joining_pool.pool.joining_endpoint, joining_pool.keys(MINI))
    probe(joining_pool.pool.joining_endpoint, joining_pool.keys(STUDIO))


def test_message_with_another_keys_routing_id_is_rejected(joining_pool: JoiningPool) -> None:
    """ZeroMQ gives a remote peer that reconnects the routing id of its old connection. A peer with another key might
    take that routing id."""
    remote = joining_pool.peer(7, MINI)
    joining_pool.hello(remote, 7, name="mini")
    before = joining_pool.pool.rejected
    impostor = joining_pool.peer(7, STUDIO)
    impostor.send_multipart(encode(Resync("r", 0)))
    while joining_pool.pool.rejected == before:
        joining_pool.listen()
    assert not joining_pool.received


def test_duplicate_drafter_name_error_names_both_models(joining_pool: JoiningPool) -> None:
    joining_pool.hello(joining_pool.peer(7, MINI), 7, name="mini", model="/one")
    text = reason(joining_pool.hello(joining_pool.peer(8, STUDIO), 8, name="mini", model="/two"))
    assert "the name mini is taken" in text and "/one" in text and "/two" in text and "omit it" in text


def close_and_wait(joining_pool: JoiningPool, socket: zmq.Socket[Any]) -> None:
    """Closes a peer's connection, and waits until the pool's socket knows."""
    identity = socket.identity
    socket.close(linger=0)
    with pytest.raises(zmq.ZMQError, match="Host unreachable"):
        for _ in range(WAIT_MS):
            joining_pool.pool.socket.send_multipart([identity, *encode(Shutdown("test"))], zmq.NOBLOCK)
            time.sleep(0.001)


def test_a_killed_drafter_that_starts_again_gets_its_name_at_once(joining_pool: JoiningPool) -> None:
    """Before its missing answers to pings have shown that it was killed."""
    killed, again = joining_pool.peer(7, MINI), joining_pool.peer(8, MINI)
    joining_pool.hello(killed, 7, name="mini")
    assert joining_pool.pool.arrivals() and not joining_pool.tick(100)
    close_and_wait(joining_pool, killed)
    again.send_multipart(encode(replace(HELLO, incarnation=8, name="mini")))
    losses: list[str] = []
    for _ in range(1000):
        joining_pool.listen()
        if losses := joining_pool.tick(100):  # no further ping
            break
        time.sleep(0.01)
    assert losses == ["draft worker mini has left: 'its connection is closed, and another process has its name'"]
    assert isinstance(joining_pool.hello(again, 8, name="mini"), Welcome) and joining_pool.pool.drafters() == {"mini"}
    assert "the name mini is taken" in reason(joining_pool.hello(joining_pool.peer(9, MINI), 9, name="mini"))


def test_another_key_does_not_get_the_name_of_a_drafter_whose_connection_is_closed(joining_pool: JoiningPool) -> None:
    cut = joining_pool.peer(7, MINI)
    joining_pool.hello(cut, 7, name="mini")
    close_and_wait(joining_pool, cut)
    assert "the name mini is taken" in reason(joining_pool.hello(joining_pool.peer(8, STUDIO), 8, name="mini"))
    assert not joining_pool.tick(100)


def test_drafter_with_another_vocabulary_is_refused(joining_pool: JoiningPool) -> None:
    joining_pool.pool.set_vocabulary(ModelVocabulary("target-model", "abc"))
    text = reason(joining_pool.hello(joining_pool.peer(7, MINI), 7, model="/draft", vocabulary="xyz"))
    assert "/draft" in text and "target-model" in text and "`outrider pairs`" in text
    assert isinstance(joining_pool.hello(joining_pool.peer(8, MINI), 8, vocabulary="abc"), Welcome)
    assert isinstance(joining_pool.hello(joining_pool.peer(9, None), 9), Welcome)  # it names no vocabulary


def test_drafter_that_joined_before_the_vocabulary_was_known_is_dismissed(joining_pool: JoiningPool) -> None:
    """It waited while the server was restarted with another model; the socket opens before the tokenizer is loaded."""
    remote = joining_pool.peer(7, MINI)
    assert isinstance(joining_pool.hello(remote, 7, name="mini", vocabulary="xyz"), Welcome)
    assert isinstance(joining_pool.hello(joining_pool.peer(8, STUDIO), 8, name="studio", vocabulary="abc"), Welcome)
    joining_pool.pool.set_vocabulary(ModelVocabulary("target-model", "abc"))
    (why,) = joining_pool.tick(1)
    assert why == reason(decode(remote.recv_multipart())) and "another vocabulary" in why and "`outrider pairs`" in why
    assert joining_pool.pool.drafters() == {"studio"}


def test_drafter_of_another_version_is_sent_both_versions(joining_pool: JoiningPool) -> None:
    remote = joining_pool.peer(7, MINI)
    header = msgpack.decode(bytes(encode(HELLO)[0]))
    answer = joining_pool.answer(remote, [msgpack.encode([999, *header[1:]])])
    assert "speaks protocol version 999, this side version 1" in reason(answer)


def test_worker_reports_a_reply_in_another_protocol_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_end_on_signals", lambda by_hand: None)
    context: zmq.Context[Any] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    with WorkerLink(endpoint, "mini", incarnation=7) as link:
        header = msgpack.decode(bytes(encode(Shutdown("no"))[0]))
        link.send(Shutdown())
        server.send_multipart([server.recv_multipart()[0], msgpack.encode([999, *header[1:]])])
        with pytest.raises(WorkerError, match=rf"{endpoint}: the other side speaks protocol version 999, this side"):
            link.enter(HELLO)
    context.destroy(linger=0)
