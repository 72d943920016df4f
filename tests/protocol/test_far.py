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
    """A TCP relay to `port`. After `cut`, its connections stay open but carry nothing. After `heal`, it carries new
    connections only, because TCP would retransmit what old ones missed later than a test waits."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._port = port
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._peers: dict[sockets.socket, sockets.socket] = {}
        self._dead: set[sockets.socket] = set()
        self._is_cut = self._closing = False
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut = True

    def heal(self) -> None:
        self._dead |= set(self._peers)
        self._is_cut = False

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        for end in (self._listener, *self._peers):
            end.close()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(0.02):
                    if self._is_cut:
                        threading.Event().wait(0.02)
                    elif key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._pass_on(selector, key.fileobj)  # type: ignore[arg-type]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        self.connections += 1
        near, remote = self._listener.accept()[0], sockets.create_connection(("127.0.0.1", self._port))
        self._peers |= {near: remote, remote: near}
        for end in (near, remote):
            selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, selector: selectors.BaseSelector, end: sockets.socket) -> None:
        data = b"" if end in self._dead else end.recv(65536)
        if not data:
            selector.unregister(end)
        elif self._peers[end] not in self._dead:
            self._peers[end].sendall(data)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["both notice", "one notices"])
def ends(
    request: pytest.FixtureRequest, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, Cable]]:
    """A ROUTER, a DEALER with the identity `far`, and the cable between them. All times are a tenth of the usual ones.

    With "one notices", the ROUTER still considers the first connection alive when the second one arrives.
    """
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
    """Sends a word in both directions, repeatedly, because messages are lost when a connection is given up."""
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
