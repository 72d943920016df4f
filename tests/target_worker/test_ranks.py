"""Ranks find each other, must run the same model and releases, and end together."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from outrider.protocol.errors import EndpointError, WorkerError
from outrider.protocol.messages import Fault, Ping, Pong, RankHello, Shutdown, TextChange, Welcome
from outrider.target_worker.rank_link import RankLink, free_ports, own_address
from outrider.target_worker.ranks import RankLeader, RankMember
from tests.suspend import suspended

LIMIT = 200.0
TIMEOUT_S = 0.4
# Five pairs of ranks in a process that is stopped; it prints how many ranks noticed a loss.
PAIRS = f"""
import contextlib, pytest, time
from outrider.target_worker import rank_link
from tests.target_worker.test_ranks import join, connected_ranks

rank_link.HEARTBEAT_INTERVAL_MS, rank_link.HEARTBEAT_TIMEOUT_MS, lost = 100, {round(1000 * TIMEOUT_S)}, set()
rank_link.RankLink._exit_after_loss = lambda link: lost.add(link)
with contextlib.ExitStack() as stack:
    for _ in range(5):
        join(*stack.enter_context(connected_ranks(pytest.MonkeyPatch())))
        time.sleep(0.03)
    time.sleep({TIMEOUT_S})  # until they have sent pings
    print("all", flush=True)
    input()
    time.sleep({TIMEOUT_S})
    print(len(lost))
"""
HELLO = RankHello(0, 2, "studio", "outrider 1, mlx 2", "abc")
FOUND = replace(HELLO, found="a vocabulary of 10, texts share a forward")


class FakeCollective:
    """Stands in for the collective of a pair of ranks: the second receives what the first broadcasts."""

    size = 2

    def __init__(self, rank: int, words: queue.Queue[bytes]) -> None:
        self.rank, self._words = rank, words

    def broadcast(self, words: bytes) -> bytes:
        if self.rank:
            return self._words.get(timeout=LIMIT)
        self._words.put(words)
        return words


@contextmanager
def connected_ranks(
    monkeypatch: pytest.MonkeyPatch, unrelated: Sequence[bytes] = ()
) -> Iterator[tuple[RankLeader, RankMember]]:
    """A leader and a member. Before the member connects, unrelated connections send `unrelated`."""
    monkeypatch.setattr("outrider.target_worker.ranks.own_address", lambda: "127.0.0.1")
    words = queue.Queue[bytes]()
    first: Any = FakeCollective(0, words)
    second: Any = FakeCollective(1, words)
    with closing(RankLeader(first)) as leader:
        for sent in unrelated:
            _, _, port = leader._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")
            with socket.create_connection(("127.0.0.1", int(port))) as connection:
                connection.settimeout(LIMIT)
                connection.sendall(sent)
                with suppress(ConnectionError):
                    connection.recv(1)  # until it was accepted, and perhaps closed
        with closing(RankMember(second)) as member:
            try:
                yield leader, member
            finally:
                leader.expect_end()
                member.expect_end()


def test_host_whose_name_has_no_address_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(8, "nodename nor servname provided, or not known")

    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP", "MLX_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostbyname", fail)
    with pytest.raises(EndpointError, match=r"has no address .* add it to /etc/hosts, or start the ranks with"):
        own_address()


def join(leader: RankLeader, member: RankMember) -> None:
    member.send(HELLO)
    leader._socket.recv_multipart()
    assert leader._joined.acquire(timeout=LIMIT)


def die(link: RankLink) -> None:
    """Closes the connection as the system does when a process dies."""
    link.expect_end()
    link._socket.close(linger=0)


def test_rank_of_the_same_kind_is_admitted_and_receives_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        entering = threading.Thread(target=member.enter, args=(replace(HELLO, rank=1, host="book"),))
        entering.start()
        leader.admit(HELLO)
        entering.join(LIMIT)
        assert leader.ranks_here == 1
        leader.broadcast(TextChange("open", 3), TextChange("mark", 3))
        assert member.receive() == [TextChange("open", 3), TextChange("mark", 3)]
        member.send(replace(FOUND, rank=1, host="book"))
        leader.receive_hellos(FOUND)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (replace(HELLO, rank=1, weights="abd"), "rank 1 and rank 0 differ in the weights: abd and abc"),
        (
            replace(HELLO, rank=1, runs="outrider 2"),
            "rank 1 and rank 0 differ in the releases: outrider 2 and outrider 1",
        ),
        (replace(HELLO, rank=1, size=3), "rank 1 and rank 0 differ in the number of ranks: 3 and 2"),
        (Fault(None, "no model at /m"), "rank 1: no model at /m"),
        (Welcome("x"), "a rank began with Welcome"),
    ],
)
def test_rank_of_another_kind_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, sent: Any, why: str) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        member.send(sent)
        with pytest.raises(WorkerError, match=why):
            leader.admit(HELLO)


def test_ranks_with_different_model_abilities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        member.send(replace(FOUND, rank=1, found="a vocabulary of 10, texts have separate forwards"))
        with pytest.raises(WorkerError, match=r"abilities of the model: .* on machines of the same kind"):
            leader.receive_hellos(FOUND)


def test_assure_returns_once_all_ranks_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        join(leader, member)
        asking = threading.Thread(target=leader.check_ranks)
        asking.start()
        assert member.receive() == [Ping(0)] and asking.is_alive()
        member.send(Pong(0, 5))
        asking.join(LIMIT)
        assert not asking.is_alive()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when this process would have ended."""
    found = threading.Event()
    monkeypatch.setattr("outrider.target_worker.rank_link.os._exit", lambda code: found.set())
    return found


@pytest.mark.parametrize("goes", ["first", "second"])
def test_rank_ends_when_the_other_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event, goes: str
) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        join(leader, member)
        going = leader if goes == "first" else member
        die(going)
        assert ended.wait(LIMIT)


def test_ranks_that_are_stopped_for_a_while_together_stay_connected() -> None:
    """As when their computer sleeps. A ping that is under way at that moment may count as unanswered."""
    with subprocess.Popen([sys.executable, "-c", PAIRS], stdin=-1, stdout=-1, text=True) as pairs:
        assert pairs.stdout is not None and pairs.stdout.readline() == "all\n"
        with suspended(pairs.pid):
            time.sleep(3 * TIMEOUT_S)
        lost, _ = pairs.communicate("\n", timeout=LIMIT)
    assert int(lost) <= 2


def test_rank_0_that_can_not_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.target_worker.ranks.CONNECT_TIMEOUT_SECONDS", 0.2)
    (port,), words = free_ports(1), queue.Queue[bytes]()
    words.put(json.dumps(["127.0.0.1", port, zmq.curve_keypair()[0].decode()]).encode())
    alone: Any = FakeCollective(1, words)
    with pytest.raises(WorkerError, match=r"rank 0 can't be reached at 127\.0\.0\.1; expected an address"):
        RankMember(alone)


def test_unrelated_connections_are_ignored(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    with connected_ranks(monkeypatch, (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 16)) as (leader, member):
        join(leader, member)
        assert not ended.is_set()
        die(member)
        assert ended.wait(LIMIT)


def test_orderly_shutdown_is_not_a_loss(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    with connected_ranks(monkeypatch) as (leader, member):
        join(leader, member)
        ending = threading.Thread(target=leader.close)
        ending.start()
        assert member.receive() == [Shutdown()]
        member.close()
        ending.join(LIMIT)
    assert not ended.is_set()
