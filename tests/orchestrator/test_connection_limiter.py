"""A limit on connections: when all slots are taken, further connections are closed until a slot is free."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from outrider.orchestrator.sockets import RouterSocket

MOST = 8


class LimitedServer:
    """A socket with a limit on connections, and clients that connect to it. Methods run the server's loop as needed."""

    def __init__(self, endpoint: str) -> None:
        self.path = endpoint.removeprefix("ipc://")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.limiter = RouterSocket(self.context, endpoint, MOST, send_hwm=100, recv_hwm=100)
        self.server = self.limiter.socket

    def connect(self, count: int) -> list[socket.socket]:
        return [self._connect(socket.AF_UNIX, self.path) for _ in range(count)]

    def connect_by_tcp(self, count: int, endpoint: str) -> list[socket.socket]:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return [self._connect(socket.AF_INET, (host, int(port))) for _ in range(count)]

    def _connect(self, family: socket.AddressFamily, address: str | tuple[str, int]) -> socket.socket:
        one, before = socket.socket(family), self.open_connections
        one.connect(address)
        if before < MOST:
            self.run_until(lambda: self.open_connections > before)
        self.settle()
        return one

    def settle(self) -> None:
        while self.limiter.monitor.poll(50):
            self.limiter.update_connections()

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Runs the server's loop until the condition holds."""
        while not holds():
            self.settle()

    def receive(self) -> bytes:
        self.run_until(lambda: bool(self.server.poll(50)))
        return self.server.recv_multipart()[1]

    @property
    def open_connections(self) -> int:
        return sum(len(limiter.open_fds) for limiter in self.limiter.endpoints)

    def close(self) -> None:
        self.limiter.close()
        self.context.destroy(linger=0)


@pytest.fixture
def limited(endpoint: str) -> Iterator[LimitedServer]:
    made = LimitedServer(endpoint)
    yield made
    made.close()


def test_full_socket_file_refuses_excess_and_serves_it_when_others_end(limited: LimitedServer, endpoint: str) -> None:
    friend, late = (limited.context.socket(zmq.DEALER) for _ in range(2))
    friend.connect(endpoint)
    limited.settle()
    with ExitStack() as stack:
        connections = [stack.enter_context(one) for one in limited.connect(3 * MOST)]
        assert limited.open_connections <= MOST + 1 and limited.limiter.is_nearly_full(with_keys=False)
        for one in connections[MOST:]:
            limited.run_until(lambda one=one: bool(select.select([one], [], [], 0)[0]))  # type: ignore[misc]
        friend.send(b"still here")
        assert limited.receive() == b"still here"
    limited.run_until(lambda: limited.open_connections == 1)
    assert not limited.limiter.is_nearly_full(with_keys=False)
    late.connect(endpoint)
    late.send(b"at last")
    assert limited.receive() == b"at last"


def test_full_tcp_port_refuses_excess_and_leaves_other_endpoints_open(limited: LimitedServer, endpoint: str) -> None:
    far = limited.limiter.open("tcp://127.0.0.1:0", MOST)
    friend, near = (limited.context.socket(zmq.DEALER) for _ in range(2))
    friend.connect(far.endpoint)
    limited.settle()
    with ExitStack() as stack:
        connections = [stack.enter_context(one) for one in limited.connect_by_tcp(3 * MOST, far.endpoint)]
        assert limited.open_connections <= MOST + 1 and limited.limiter.is_nearly_full(with_keys=True)
        assert not limited.limiter.is_nearly_full(with_keys=False)
        for one in connections[MOST:]:
            limited.run_until(lambda one=one: bool(select.select([one], [], [], 0)[0]))  # type: ignore[misc]
        assert sum(one.recv(99) == b"" or one.recv(99) == b"" for one in connections[MOST:]) == 2 * MOST
        near.connect(endpoint)
        for one, word in ((near, b"at home"), (friend, b"still here")):
            one.send(word)
            assert limited.receive() == word
        for one in connections:
            one.close()
        limited.settle()
        late = limited.context.socket(zmq.DEALER)
        late.connect(far.endpoint)
        late.send(b"at last")
        limited.settle()
        assert limited.receive() == b"at last"
