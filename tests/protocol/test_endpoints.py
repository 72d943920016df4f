"""An endpoint is checked before ZeroMQ uses it, and served by one process at a time; its files are removed."""

from __future__ import annotations

import os
import socket as plain
import threading
from contextlib import closing

import pytest
import zmq

from outrider.protocol import endpoints, socket_files
from outrider.protocol.endpoints import BoundSocket, Ipc, Tcp, connect, parse_endpoint
from outrider.protocol.errors import EndpointError
from outrider.protocol.keys import ClientKeys, make_pair
from outrider.protocol.socket_files import MAX_PATH_BYTES


@pytest.fixture
def sockets():
    """Returns a function that makes sockets, which are closed after the test."""
    context = zmq.Context()
    made = []

    def make(kind=zmq.ROUTER):
        made.append(context.socket(kind))
        made[-1].linger = 0
        return made[-1]

    yield make
    for socket in made:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def ipc(short):
    return f"ipc://{short}/s"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("ipc:///tmp/x", Ipc("/tmp/x")),
        ("ipc:///tmp/../tmp/x", Ipc("/tmp/x")),
        ("tcp://127.0.0.1:5555", Tcp("127.0.0.1", 5555)),
        ("tcp://mac-studio.local:1", Tcp("mac-studio.local", 1)),
        ("tcp://*:0", Tcp("*", 0)),
        ("tcp://[fe80::1]:80", Tcp("fe80::1", 80)),
    ],
)
def test_endpoints_round_trip_through_text(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


def test_a_relative_path_becomes_absolute(short, monkeypatch):
    monkeypatch.chdir(short)
    assert parse_endpoint("ipc://a/b") == Ipc(f"{os.getcwd()}/a/b")


def test_a_path_relative_to_a_removed_directory_is_refused(short, monkeypatch):
    (gone := short / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(EndpointError, match="expected an absolute path"):
        parse_endpoint("ipc://b")


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "/tmp/x", "http://h:1", "inproc://x", "ipc:/x", "ipc://", "ipc://@x", "ipc://*", "ipc:///tmp/",
        "ipc:///tmp/a\0b", "ipc:///tmp/a\nb", "tcp://", "tcp://h", "tcp://:5", "tcp://h:", "tcp://h:x", "tcp://h:-1",
        "tcp://h:65536", "tcp://h:99999999999", "tcp://h:٣", "tcp://a b:1", "tcp://::1:5", "tcp://[::1:5",
        "tcp://[zz]:5", "tcp://h/p:1", "tcp://eth0;1.2.3.4:5", None, b"ipc:///tmp/a",
    ],
)  # fmt: skip
def test_invalid_endpoint_is_refused(text):
    with pytest.raises(EndpointError, match="expected"):
        parse_endpoint(text)


def test_path_longer_than_the_system_allows_is_refused():
    start = "/tmp/"
    assert parse_endpoint("ipc://" + start.ljust(MAX_PATH_BYTES, "x"))
    with pytest.raises(EndpointError, match=f"{MAX_PATH_BYTES + 1} bytes; this system allows {MAX_PATH_BYTES}"):
        parse_endpoint("ipc://" + start.ljust(MAX_PATH_BYTES + 1, "x"))
    with pytest.raises(EndpointError, match="bytes"):
        parse_endpoint("ipc://" + start.ljust(MAX_PATH_BYTES - 1, "x") + "é")


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0"])
def test_port_zero_binds_a_free_port_and_reports_it(sockets, text):
    server, client = sockets(), sockets(zmq.DEALER)
    try:
        bound = BoundSocket(server, text)
    except EndpointError:
        pytest.skip("this machine has no such loopback address")
    assert isinstance(parse_endpoint(bound.endpoint), Tcp) and not bound.endpoint.endswith(":0")
    connect(client, bound.endpoint)
    client.send(b"hello")
    assert server.poll(10_000) and server.recv_multipart()[1:] == [b"hello"]


def test_port_in_use_is_refused(sockets):
    with (
        closing(BoundSocket(sockets(), "tcp://127.0.0.1:0")) as first,
        pytest.raises(EndpointError, match="port is in use"),
    ):
        BoundSocket(sockets(), first.endpoint)


def test_an_address_of_another_machine_is_refused(sockets):
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(EndpointError, match="can't be used"):
            BoundSocket(sockets(), f"tcp://{host}:0", make_pair(), "client")


def test_second_server_on_a_path_is_refused_and_the_first_continues(sockets, ipc):
    server, client = sockets(), sockets(zmq.DEALER)
    with closing(BoundSocket(server, ipc)) as bound:
        for _ in range(2):
            with pytest.raises(EndpointError, match="already served by a running process"):
                BoundSocket(sockets(), ipc)
        connect(client, bound.endpoint)
        client.send(b"still there")
        assert server.poll(10_000)


def test_closing_leaves_no_file_and_frees_the_path(sockets, ipc, short):
    for _ in range(3):
        bound = BoundSocket(sockets(), ipc)
        assert (short / "s").is_socket()
        bound.close()
        bound.close()
        assert not list(short.iterdir())


def test_a_server_removes_only_the_socket_that_it_made(sockets, ipc, short):
    bound = BoundSocket(sockets(), ipc)
    (short / "s").unlink()
    (short / "s").write_text("thesis")
    bound.close()
    assert (short / "s").read_text() == "thesis" and len(list(short.iterdir())) == 1


def test_close_keeps_a_socket_created_by_another_program(sockets, ipc, short):
    bound = BoundSocket(sockets(), ipc)
    (short / "s").unlink()
    with plain.socket(plain.AF_UNIX) as other:
        other.bind(str(short / "s"))
        bound.close()
        assert (short / "s").is_socket()


KILLED = """
import os, signal, sys, zmq
from outrider.protocol.endpoints import BoundSocket
bound = BoundSocket(zmq.Context().socket(zmq.ROUTER), sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_socket_of_a_killed_server_is_taken_over(sockets, ipc, short, run_until_killed):
    run_until_killed(KILLED, ipc)
    assert {path.name for path in short.iterdir()} == {"s", "s.lock"}
    with closing(BoundSocket(sockets(), ipc)):
        pass
    assert not list(short.iterdir())


def test_at_most_one_thread_holds_a_socket_lock(short):
    """Each thread takes and releases the lock repeatedly, so its file is removed while other threads open it."""
    path, holders, counts = str(short / "s"), [], []

    def contend():
        for _ in range(200):
            try:
                lock = socket_files.SocketLock(path)
            except EndpointError:
                continue
            holders.append(1)
            counts.append(len(holders))
            holders.pop()
            lock.release()

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(counts) == 1
    assert not list(short.iterdir())


def test_lock_file_removed_before_it_is_locked_is_created_again(short, monkeypatch):
    path, flock, removed = str(short / "s"), socket_files.fcntl.flock, []

    def remove_then_lock(descriptor, operation):
        if not removed:
            removed.append(os.unlink(f"{path}.lock"))
        flock(descriptor, operation)

    monkeypatch.setattr(socket_files.fcntl, "flock", remove_then_lock)
    lock = socket_files.SocketLock(path)
    with pytest.raises(EndpointError, match="already served"):
        socket_files.SocketLock(path)
    lock.release()


def test_live_socket_of_another_program_is_not_taken_over(sockets, ipc, short):
    with plain.socket(plain.AF_UNIX) as other:
        other.bind(str(short / "s"))
        other.listen()
        with pytest.raises(EndpointError, match="already served"):
            BoundSocket(sockets(), ipc)
    assert [path.name for path in short.iterdir()] == ["s"]


def test_file_that_is_not_a_socket_is_never_replaced(sockets, ipc, short):
    (short / "s").write_text("thesis")
    with pytest.raises(EndpointError, match="exists and is not a socket"):
        BoundSocket(sockets(), ipc)
    assert (short / "s").read_text() == "thesis" and len(list(short.iterdir())) == 1


def test_missing_or_forbidden_directory_is_an_endpoint_error(sockets, ipc, short, monkeypatch):
    with pytest.raises(EndpointError, match="No such file or directory; choose a directory"):
        BoundSocket(sockets(), f"{ipc}/none/x")

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket_files.os, "open", forbidden)
    with pytest.raises(EndpointError, match="Permission denied; choose a directory"):
        BoundSocket(sockets(), ipc)


def test_bind_refused_by_zeromq_is_an_error_and_leaves_no_file(ipc, short):
    class Refusing:
        handshake_ivl = 30_000

        def bind(self, _):
            os.close(self.use_fd)  # the listening socket that it was given
            raise zmq.ZMQError(13)

    for endpoint in ("tcp://127.0.0.1:80", ipc):
        with pytest.raises(EndpointError, match="no permission"):
            BoundSocket(Refusing(), endpoint)
    assert not list(short.iterdir())


@pytest.mark.parametrize("endpoint", ["tcp://*:5", "tcp://127.0.0.1:0", "tcp://h:70000"])
def test_connect_refuses_an_unreachable_endpoint(sockets, endpoint):
    with pytest.raises(EndpointError):
        connect(sockets(zmq.DEALER), endpoint)


@pytest.mark.parametrize(
    ("host", "families", "ipv6"),
    [
        ("six.local", [plain.AF_INET6], True),
        ("both.local", [plain.AF_INET6, plain.AF_INET], False),
        ("none.local", None, False),
    ],
)
def test_name_with_ipv6_addresses_only_is_connected_by_ipv6(sockets, monkeypatch, host, families, ipv6):
    def addresses(*_):
        if families is None:
            raise plain.gaierror
        return [(family, plain.SOCK_STREAM, 6, "", ("", 0)) for family in families]

    monkeypatch.setattr(plain, "getaddrinfo", addresses)
    socket = sockets(zmq.DEALER)
    connect(socket, f"tcp://{host}:5556", ClientKeys(make_pair(), make_pair().public))
    assert socket.ipv6 == ipv6


def test_oversized_frame_is_dropped_and_other_clients_continue(sockets, ipc, monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_FRAME_BYTES", 1000)
    server, excessive, valid = sockets(), sockets(zmq.DEALER), sockets(zmq.DEALER)
    with closing(BoundSocket(server, ipc)) as bound:
        connect(excessive, bound.endpoint)
        excessive.send(b"x" * 1001)
        connect(valid, bound.endpoint)
        valid.send(b"x" * 1000)
        assert server.poll(10_000) and len(server.recv_multipart()[1]) == 1000
        assert not server.poll(100)


def test_socket_for_other_machines_keeps_its_shorter_handshake(sockets):
    server, client, plain_server = sockets(), sockets(zmq.DEALER), sockets()
    endpoints.set_remote_options(server)
    endpoints.set_remote_options(client)
    with (
        closing(BoundSocket(server, "tcp://127.0.0.1:0")) as bound,
        closing(BoundSocket(plain_server, "tcp://127.0.0.1:0")),
    ):
        connect(client, bound.endpoint)
        assert server.handshake_ivl == client.handshake_ivl == endpoints.HEARTBEAT_TIMEOUT_MS
        assert plain_server.handshake_ivl == endpoints.HANDSHAKE_TIMEOUT_MS


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_descriptor_that_now_belongs_to_a_file_is_left_alone(sockets, tmp_path):
    """A connection may end before the server closes it, and a file may have its descriptor by then."""
    bound = BoundSocket(sockets(), "tcp://127.0.0.1:0")
    with closing(bound), open(tmp_path / "file", "w") as file:
        before = len(os.listdir("/proc/self/fd"))
        bound.close_connection(file.fileno())
        assert len(os.listdir("/proc/self/fd")) == before
        file.write("still open")
        file.flush()
