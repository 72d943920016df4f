"""A limit on connections: when all slots are taken, further ones wait until a slot is free."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from outrider.orchestrator.sockets import RouterSocket

MOST = 8


class Visitors:
    """Connections to a limiter, and the thread that would watch it."""

    def __init__(self, endpoint: str) -> None:
        self.path = endpoint.removeprefix("ipc://")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.limiter = RouterSocket(self.context, endpoint, MOST, send_hwm=100, recv_hwm=100)
        self.server = self.limiter.socket

    def come(self, many: int) -> list[socket.socket]:
        return [self._one(socket.AF_UNIX, self.path) for _ in range(many)]

    def come_by_tcp(self, many: int, endpoint: str) -> list[socket.socket]:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return [self._one(socket.AF_INET, (host, int(port))) for _ in range(many)]

    def _one(self, family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
        one, before = socket.socket(family), self.inside
        one.connect(address)
        if before < MOST:
            self.until(lambda: self.inside > before)
        self.settle()
        return one

    def settle(self) -> None:
        while self.limiter.monitor.poll(50):
            self.limiter.update_connections()

    def until(self, holds: Callable[[], bool]) -> None:
        """Watches the limiter until this holds."""
        while not holds():
            self.settle()

    def receive(self) -> bytes:
        self.until(lambda: bool(self.server.poll(50)))
        return self.server.recv_multipart()[1]

    @property
    def inside(self) -> int:
        return sum(len(limiter.open_fds) for limiter in self.limiter.endpoints)

    def close(self) -> None:
        self.limiter.close()
        self.context.destroy(linger=0)


@pytest.fixture
def visitors(endpoint: str) -> Iterator[Visitors]:
    made = Visitors(endpoint)
    yield made
    made.close()


@pytest.fixture
def leave() -> Iterator[Callable[..., None]]:
    yield lambda *leaving: [one.close() for one in leaving] and None


def test_connections_never_exceed_the_limit_and_all_are_served(visitors: Visitors, leave: Callable[..., None]) -> None:
    with ExitStack() as stack:
        came = [stack.enter_context(one) for one in visitors.come(3 * MOST)]
        assert visitors.inside == MOST and visitors.limiter.is_nearly_full(with_keys=False)
        for first in range(0, 2 * MOST, 2):
            leave(*came[first : first + 2])
            visitors.settle()
            visitors.come(0)
            assert visitors.inside <= MOST
    visitors.until(lambda: visitors.inside == 0)
    assert not visitors.limiter.is_nearly_full(with_keys=False)


def test_connected_peer_is_served_while_the_limit_is_reached(visitors: Visitors, endpoint: str) -> None:
    friend, late = (visitors.context.socket(zmq.DEALER) for _ in range(2))
    friend.connect(endpoint)
    visitors.settle()
    with ExitStack() as stack:
        came = [stack.enter_context(one) for one in visitors.come(2 * MOST)]
        friend.send(b"still here")
        assert visitors.receive() == b"still here"
        late.connect(endpoint)
        late.send(b"at last")
        visitors.settle()
        assert not visitors.server.poll(50)
        for one in came:
            one.close()
        visitors.settle()
        assert visitors.receive() == b"at last"


def test_full_tcp_port_refuses_excess_and_leaves_other_endpoints_open(visitors: Visitors, endpoint: str) -> None:
    far = visitors.limiter.open("tcp://127.0.0.1:0", MOST)
    friend, near = (visitors.context.socket(zmq.DEALER) for _ in range(2))
    friend.connect(far.endpoint)
    visitors.settle()
    with ExitStack() as stack:
        came = [stack.enter_context(one) for one in visitors.come_by_tcp(3 * MOST, far.endpoint)]
        assert visitors.inside <= MOST + 1 and visitors.limiter.is_nearly_full(with_keys=True)
        assert not visitors.limiter.is_nearly_full(with_keys=False)
        for one in came[MOST:]:
            visitors.until(lambda one=one: bool(select.select([one], [], [], 0)[0]))  # type: ignore[misc]
        assert sum(one.recv(99) == b"" or one.recv(99) == b"" for one in came[MOST:]) == 2 * MOST
        near.connect(endpoint)
        for one, word in ((near, b"at home"), (friend, b"still here")):
            one.send(word)
            assert visitors.receive() == word
        for one in came:
            one.close()
        visitors.settle()
        late = visitors.context.socket(zmq.DEALER)
        late.connect(far.endpoint)
        late.send(b"at last")
        visitors.settle()
        assert visitors.receive() == b"at last"
