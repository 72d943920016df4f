"""Over real sockets, no message arrives from a peer with no key, a wrong key or a replayed session."""

from __future__ import annotations

import os
import selectors
import signal
import socket as sockets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.orchestrator.auth import CurveAuth, create_curve_auth
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import worker_link
from outrider.protocol.endpoints import BoundSocket, Tcp, connect, parse_endpoint, probe
from outrider.protocol.errors import EndpointError, KeyFault
from outrider.protocol.keys import CLIENT, DRAFTER, AllowedKey, ClientKeys, Keyring, make_pair
from outrider.protocol.messages import Loading
from outrider.protocol.worker_link import WorkerLink

WAIT_MS = 200_000
ATTEMPTS = int(os.environ.get("OUTRIDER_STRANGERS", "20"))
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
FRIEND, STRANGER = make_pair(), make_pair()


class Server:
    """A ROUTER that requires keys, and peers that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.ring = Keyring(folder)
        self.ring.make()
        self.ring.allow(AllowedKey(DRAFTER, FRIEND.public, "friend"))
        self.context: zmq.Context[Any] = zmq.Context()
        self.auth = CurveAuth(self.context, self.ring)
        self.socket = self.context.socket(zmq.ROUTER)
        self.monitor = self.socket.get_monitor_socket(FAILED)
        self.bound = BoundSocket(self.socket, "tcp://127.0.0.1:0", self.auth.own, DRAFTER)
        self.endpoint = self.bound.endpoint
        self.peers: list[zmq.Socket[Any]] = []

    def keys(self, pair: Any = FRIEND, server: str = "") -> ClientKeys:
        return ClientKeys(pair, server or self.auth.own.public)

    def connect_peer(self, keys: ClientKeys | None, endpoint: str = "") -> None:
        """Connects a peer, which sends a message as soon as it is accepted."""
        self.peers.append(self.context.socket(zmq.DEALER))
        connect(self.peers[-1], endpoint or self.endpoint, keys)
        with suppress(zmq.Again):  # it was refused before it could send anything
            self.peers[-1].send(b"word", zmq.NOBLOCK)

    def await_rejections(self, count: int) -> None:
        """Waits until so many handshakes have failed."""
        for _ in range(count):
            assert self.monitor.poll(WAIT_MS)
            recv_monitor_message(self.monitor)

    def received(self) -> list[bytes]:
        return self.socket.recv_multipart()[1:] if self.socket.poll(WAIT_MS) else []

    def admits(self, keys: ClientKeys | None) -> bool:
        try:
            probe(self.endpoint, keys)
        except KeyFault:
            return False
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.bound.close()
        self.auth.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "keys")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("make_keys", "reason"),
    [
        (lambda server: None, "requires keys"),
        (lambda server: server.keys(STRANGER), "refuses this side's key"),
        (lambda server: server.keys(FRIEND, STRANGER.public), "has a server with another key than"),
    ],
    ids=["unauthenticated", "wrongly keyed", "another server's key"],
)
def test_no_message_is_accepted_from_unauthorized_peers(
    server: Server, make_keys: Callable[[Server], ClientKeys | None], reason: str
) -> None:
    keys = make_keys(server)
    for _ in range(ATTEMPTS):
        server.connect_peer(keys)
    server.await_rejections(ATTEMPTS)
    with pytest.raises(KeyFault, match=reason):
        probe(server.endpoint, keys)
    server.connect_peer(server.keys())
    assert server.received() == [b"word"]  # from the peer with an allowed key, which connected last
    assert not server.socket.poll(200)


def wait_until_refused(socket: zmq.Socket[bytes]) -> None:
    """Waits until ZeroMQ has ended the connection and sending would block. Sometimes it reconnects instead."""
    for _ in range(100):
        if not socket.poll(10, zmq.POLLOUT):
            return


def test_client_refused_before_its_first_message_gets_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ then has no connection for the message, and would wait for one forever."""
    open_socket = Client.open_socket

    def open_and_wait(client: Client) -> zmq.Socket[bytes]:
        socket = open_socket(client)
        wait_until_refused(socket)
        return socket

    monkeypatch.setattr(Client, "open_socket", open_and_wait)
    for call in (lambda: Client(server.endpoint).stats(), lambda: Client(server.endpoint).generate("a")):
        with pytest.raises(KeyFault, match="requires keys"):
            call()


def test_client_refused_at_a_path_gets_the_reason(server: Server, short: Path, tmp_path: Path) -> None:
    stranger, socket = Keyring(tmp_path / "stranger"), server.context.socket(zmq.ROUTER)
    stranger.make()
    with closing(BoundSocket(socket, f"ipc://{short}/keyed", server.auth.own, CLIENT)) as bound:
        with pytest.raises(KeyFault, match="requires keys"):
            Client(bound.endpoint).stats()
        with pytest.raises(KeyFault, match="refuses this side's key"):
            Client(bound.endpoint, server_key=server.auth.own.public, keys=stranger.folder).stats()


def test_worker_refused_before_its_first_message_does_not_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "SEND_TIMEOUT_MS", 1)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with WorkerLink(server.endpoint, "mini") as link:
        wait_until_refused(link._socket)
        link.send(Loading("starting"))
    for number, handler in before.items():
        signal.signal(number, handler)


def test_forwarded_port_without_a_server_is_not_reported_as_another_key() -> None:
    """As with an SSH tunnel or a container. A worker then continues to wait for its server (`WorkerLink.enter`)."""
    with sockets.create_server(("127.0.0.1", 0)) as listener:

        def close_connections() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=close_connections, daemon=True).start()
        for keys in (ClientKeys(FRIEND, STRANGER.public), None):
            with pytest.raises(EndpointError, match="closes connections"):
                probe(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys)
        listener.shutdown(sockets.SHUT_RDWR)


class Recorder:
    """A relay for one connection to `port`, which records what the client sends. It closes `cut` connections before."""

    def __init__(self, port: int, cut: int = 0) -> None:
        self.sent = b""
        self._cut = cut
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        for _ in range(self._cut):
            with self._listener.accept()[0] as near:
                near.recv(1)
        near, far = self._listener.accept()[0], sockets.create_connection(("127.0.0.1", self._port))
        with near, far, selectors.DefaultSelector() as selector:
            for end, other in ((near, far), (far, near)):
                selector.register(end, selectors.EVENT_READ, other)
            while True:
                for ready, _ in selector.select():
                    data = ready.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    self.sent += data if ready.fileobj is near else b""
                    ready.data.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_handshake_that_was_cut_is_not_reported_as_another_key(server: Server) -> None:
    """As when a server ends, or the link is too slow for its time limit. A drafter that waits would end."""
    recorder = Recorder(server.bound._listener.getsockname()[1], cut=1)
    probe(recorder.endpoint, server.keys())
    recorder.close()


def test_no_message_is_accepted_from_a_replayed_session(server: Server) -> None:
    port = parse_endpoint(server.endpoint)
    assert isinstance(port, Tcp)
    recorder = Recorder(port.port)
    server.connect_peer(server.keys(), recorder.endpoint)
    assert server.received() == [b"word"]
    recorder.close()
    assert b"CURVE" in recorder.sent and b"INITIATE" in recorder.sent and b"word" not in recorder.sent
    for _ in range(ATTEMPTS):
        with sockets.create_connection(("127.0.0.1", port.port)) as replaying:
            replaying.settimeout(WAIT_MS / 1000)
            replaying.sendall(recorder.sent)
            while replaying.recv(65536):  # until the server closes the connection
                pass
    server.await_rejections(ATTEMPTS)
    assert not server.socket.poll(200)
    server.connect_peer(server.keys())
    assert server.received() == [b"word"]


def test_key_is_valid_for_one_role_only(server: Server) -> None:
    client = make_pair()
    server.ring.allow(AllowedKey(CLIENT, client.public, "laptop"))
    assert not server.admits(server.keys(client))
    assert server.auth.is_allowed(CLIENT, client.public) and not server.auth.is_allowed(CLIENT, FRIEND.public)


def test_allowing_or_revoking_a_key_applies_at_the_next_handshake(server: Server) -> None:
    assert server.admits(server.keys()) and not server.admits(server.keys(STRANGER))
    server.ring.allow(AllowedKey(DRAFTER, STRANGER.public, "new"))
    assert server.admits(server.keys(STRANGER))
    server.ring.revoke("friend")
    assert not server.admits(server.keys())


def test_refused_key_stays_refused_even_if_allowed_again(server: Server) -> None:
    server.auth.refuse(FRIEND.public, "it sent invalid messages")
    assert not server.admits(server.keys())
    server.ring.allow(AllowedKey(DRAFTER, FRIEND.public, "friend-again"))
    assert not server.admits(server.keys())


@pytest.mark.parametrize("spoil", [lambda file: file.chmod(0o644), lambda file: file.write_text("who knows")])
def test_untrusted_allowed_keys_file_admits_no_one(server: Server, spoil: Callable[[Path], None]) -> None:
    spoil(server.ring.allowed_file)
    assert not server.admits(server.keys())


def test_socket_without_authenticator_admits_no_one(tmp_path: Path) -> None:
    """Without an authenticator, ZeroMQ itself would accept every key."""
    context: zmq.Context[Any] = zmq.Context()
    pair = make_pair()
    with (
        closing(BoundSocket(context.socket(zmq.ROUTER), "tcp://127.0.0.1:0", pair, DRAFTER)) as bound,
        pytest.raises(KeyFault),
    ):
        probe(bound.endpoint, ClientKeys(FRIEND, pair.public))
    context.destroy(linger=0)


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://192.0.2.1:5555", "tcp://studio.local:5"])
def test_remote_endpoints_require_keys(endpoint: str, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        with pytest.raises(EndpointError, match=r"accept connections without a key; expected keys"):
            BoundSocket(socket, endpoint)
        with pytest.raises(EndpointError):
            connect(socket, endpoint)
    for settings in (ServeSettings(endpoint=endpoint), ServeSettings(workers_endpoint=endpoint)):
        with pytest.raises(
            KeyFault, match=r"can't be served without keys: there is no key .* `outrider keys make --keys "
        ):
            create_curve_auth(ServeSettings(**{**_set(settings), "keys": tmp_path / "none"}), context)
    context.term()


def _set(settings: ServeSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("endpoint", "workers_endpoint") if getattr(settings, name)}


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0", "ipc:///tmp/x"])
def test_local_endpoints_require_keys_only_if_keyed(endpoint: str, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    assert create_curve_auth(ServeSettings(endpoint=endpoint), context) is None
    assert create_curve_auth(ServeSettings(keyed=True), context) is None
    with pytest.raises(KeyFault):
        create_curve_auth(ServeSettings(endpoint=endpoint, keyed=True, keys=tmp_path), context)
    context.term()
