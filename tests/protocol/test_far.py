"""A silently broken link to another machine: both ends notice, and the connecting end retries."""

from __future__ import annotations

import selectors
import socket as sockets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from outrider.protocol import endpoints


class Cable:
    """Carries bytes to `port`; one that is `cut` keeps all connections and carries nothing. A healed one carries new
    connections only: what an old one missed, TCP would say again later than anybody waits here."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ways: dict[sockets.socket, sockets.socket] = {}
        self._dead: set[sockets.socket] = set()
        self._is_cut = self._over = False
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut = True

    def heal(self) -> None:
        self._dead |= set(self._ways)
        self._is_cut = False

    def close(self) -> None:
        self._over = True
        self._thread.join()
        for end in (self._listener, *self._ways):
            end.close()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            while not self._over:
                for key, _ in waiting.select(0.02):
                    if self._is_cut:
                        threading.Event().wait(0.02)
                    elif key.fileobj is self._listener:
                        self._accept(waiting)
                    else:
                        self._pass_on(waiting, key.fileobj)  # type: ignore[arg-type]

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        self.connections += 1
        near, far_end = self._listener.accept()[0], sockets.create_connection(("127.0.0.1", self._port))
        self._ways |= {near: far_end, far_end: near}
        for end in (near, far_end):
            waiting.register(end, selectors.EVENT_READ)

    def _pass_on(self, waiting: selectors.BaseSelector, end: sockets.socket) -> None:
        data = b"" if end in self._dead else end.recv(65536)
        if not data:
            waiting.unregister(end)
        elif self._ways[end] not in self._dead:
            self._ways[end].sendall(data)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["both notice", "one notices"])
def ends(
    request: pytest.FixtureRequest, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, Cable]]:
    """A ROUTER, a DEALER that it knows as `far`, and what is between; all is quicker by ten times. The ROUTER may
    still hold the first connection for sound when the second one comes."""
    names = "HEARTBEAT_INTERVAL HEARTBEAT_TIMEOUT CONNECT_TIMEOUT RECONNECT_INTERVAL MAX_RECONNECT_INTERVAL"
    for name in (f"{delay}_MS" for delay in names.split()):
        monkeypatch.setattr(endpoints, name, getattr(endpoints, name) // 10)
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    endpoints.set_remote_options(router)
    endpoints.set_remote_options(dealer)
    if request.param == "one notices":
        router.heartbeat_ivl = dealer.heartbeat_ttl = 0
    dealer.identity = b"far"
    cable = Cable(router.bind_to_random_port("tcp://127.0.0.1"))
    dealer.connect(f"tcp://127.0.0.1:{cable.port}")
    yield router, dealer, cable
    cable.close()


def exchange(dealer: Any, router: Any, word: bytes) -> None:
    """There and back, as soon as it gets through: a link that is given up takes along what was on its way."""
    received = b""
    while received != word:
        dealer.send(word)
        while received != word and router.poll(50):
            identity, received = router.recv_multipart()
            assert identity == b"far"
    answered = b""
    while answered != word:
        router.send_multipart([b"far", word])
        while answered != word and dealer.poll(50):
            answered = dealer.recv()


def test_silent_link_reconnects_with_the_same_identity(ends: tuple[Any, Any, Cable]) -> None:
    router, dealer, cable = ends
    exchange(dealer, router, b"before")
    cable.cut()
    threading.Event().wait(0.3)
    cable.heal()
    exchange(dealer, router, b"after")
    assert cable.connections > 1
