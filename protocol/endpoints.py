"""Endpoints: `ipc://PATH` on one machine, `tcp://HOST:PORT` between machines.

Owns the syntax of an endpoint, the right to serve it, and the rule that connections to other machines need keys. ZeroMQ
would truncate a port to 16 bits, take an ipc path from a live server, replace any file there, and connect unencrypted;
`BoundSocket` and `connect` refuse with an error of one sentence.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket as sockets
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import zmq

from outrider.protocol.errors import EndpointError, KeyFault, ServerBusy
from outrider.protocol.keys import ClientKeys, KeyPair, Keyring, key_bytes, parse_key
from outrider.protocol.schema import MAX_FRAME_BYTES
from outrider.protocol.socket_files import MAX_PATH_BYTES, SocketLock

Socket: TypeAlias = zmq.Socket[Any]

HANDSHAKE_TIMEOUT_MS = 10_000
"""Connections that do not complete ZeroMQ's handshake within this time are closed."""
BACKLOG = 128
"""Connections that the system queues until they are accepted."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253})")
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000
"""TCP repeats a lost packet after about 200 ms, then after 400: a working link is never silent for so long."""
MAX_PIECE_BYTES = 500 * HEARTBEAT_TIMEOUT_MS
"""The most bytes of an array in one message: a link of 1 MB/s carries them in half that time. ZeroMQ's heartbeats count
whole frames only, and close a link that takes longer for one."""

CONNECT_TIMEOUT_MS = 1000
RECONNECT_INTERVAL_MS, MAX_RECONNECT_INTERVAL_MS = 100, 400
PROBE_TIMEOUT_SECONDS = 3.0
LOCAL_TIMEOUT_SECONDS = 0.2
_NO_SERVER_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EACCES)
_HANDSHAKE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HANDSHAKE_EVENTS |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True, slots=True)
class Ipc:
    """A unix socket at an absolute path."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host name or address, and a port. Only to serve: host `*` is every interface, port 0 any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


Endpoint: TypeAlias = Ipc | Tcp


def parse_endpoint(text: str) -> Endpoint:
    """Parses an endpoint; a relative ipc path starts in the current directory.

    Raises:
        EndpointError: the text is no endpoint, a port is out of range, or a path is too long for a unix socket.
    """
    if not isinstance(text, str):
        raise EndpointError(f"{text!r} is not an endpoint; expected ipc://PATH or tcp://HOST:PORT")
    scheme, _, rest = text.partition("://")
    if scheme == "ipc":
        return _parse_ipc(text, rest)
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    if scheme in ("http", "https"):
        raise EndpointError(
            f"{text} is an HTTP address, for curl and the clients of OpenAI's and Anthropic's APIs; expected the"
            " endpoint that `outrider serve` prints as `clients:`, like ipc:///tmp/outrider"
        )
    raise EndpointError(f"{text!r} is not an endpoint; expected ipc://PATH or tcp://HOST:PORT")


def _parse_ipc(text: str, path: str) -> Ipc:
    if not path or path[0] in "@*" or path.endswith("/") or not path.isprintable():
        raise EndpointError(f"{text!r} has no path; expected ipc:// and the path of a socket, like ipc:///tmp/outrider")
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        raise EndpointError(f"{text!r} is relative to a removed directory; expected an absolute path") from None
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise EndpointError(
            f"the socket path {path} has {length} bytes; this system allows {MAX_PATH_BYTES}:"
            " choose a shorter directory"
        )
    return Ipc(path)


def _parse_tcp(text: str, rest: str) -> Tcp:
    host, _, port = rest.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise EndpointError(f"{text!r} has no port from 0 to 65535; expected tcp://HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        with suppress(ValueError):
            ipaddress.IPv6Address(host[1:-1])
            return Tcp(host[1:-1], int(port))
    if host != "*" and not _HOST.fullmatch(host):
        raise EndpointError(f"{text!r} has no host; expected a name, an IPv4 address, an IPv6 address in [] or *")
    return Tcp(host, int(port))


def _address_family(where: Endpoint) -> sockets.AddressFamily:
    if isinstance(where, Ipc):
        return sockets.AF_UNIX
    return sockets.AF_INET6 if _is_ipv6(where.host) else sockets.AF_INET


def _is_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address, or a name of IPv6 addresses only: ZeroMQ uses one family, by default IPv4."""
    if ":" in host or host == "*":
        return ":" in host
    with suppress(EndpointError):  # a name may be found later
        return _resolve_host(host) == {sockets.AF_INET6}
    return False


def is_local(where: Endpoint) -> bool:
    """Returns whether only this machine can reach the endpoint; names other than localhost count as remote."""
    if isinstance(where, Ipc) or where.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(where.host).is_loopback
    except ValueError:
        return False


def parse_reachable(endpoint: str) -> Endpoint:
    """Parses an endpoint to connect to. Raises EndpointError if it is malformed, or can only be listened on."""
    where = parse_endpoint(endpoint)
    if isinstance(where, Tcp) and (where.host == "*" or where.port == 0):
        raise EndpointError(
            f"{endpoint} is an address to listen on, not to connect to; expected the server's host and port"
        )
    return where


def find_client_keys(
    endpoint: str, server_key: str | None = None, folder: str | os.PathLike[str] | None = None
) -> ClientKeys | None:
    """Returns the keys for a connection to `endpoint`; None if it is on this machine and has no trusted key.

    `server_key`: the key that the server must have; None: the trusted one. `folder`: see `Keyring`.

    Raises:
        KeyFault: a key is missing or can't be used.
        EndpointError: the endpoint is malformed.
    """
    where, keyring = parse_reachable(endpoint), Keyring(Path(folder) if folder is not None else None)
    host = where.host if isinstance(where, Tcp) else endpoint
    known = parse_key(server_key) if server_key is not None else None
    if known is None and isinstance(where, Tcp):
        trusted = keyring.servers()
        known = trusted.get(str(where).removeprefix("tcp://"), trusted.get(host))
    if known is not None:
        return ClientKeys(keyring.own(), known)
    if is_local(where):
        return None
    raise KeyFault(
        f"{endpoint} is on another machine, and no key of its server is trusted; with the key that `outrider serve`"
        f" prints there, run {keyring.command(f'trust {host} KEY')} or add --server-key KEY"
    )


def connect(socket: Socket, endpoint: str, keys: ClientKeys | None = None) -> None:
    """Connects `socket`; the server may start later, and must have the server key in `keys`.

    Raises:
        EndpointError: the endpoint is malformed, or it is on another machine and there are no `keys`.
    """
    where = parse_reachable(endpoint)
    if keys is None and not is_local(where):
        raise EndpointError(f"{endpoint} is on another machine; expected the keys of both sides (`outrider keys`)")
    _set_common_options(socket, where)
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = key_bytes(keys.own.public), key_bytes(keys.own.secret)
        socket.curve_serverkey = key_bytes(keys.server)
    socket.connect(str(where))


class BoundSocket:
    """Serves `endpoint` with `socket`, from creation to `close`, which closes the socket and leaves no file. The
    attribute `endpoint` has the chosen port instead of 0. The owner of the socket keeps the descriptors of the open
    connections in `open_fds`, and closes those beyond `max_connections`.

    With its `own` keys the socket admits those that its context's authentication allows for `role`, the ZAP domain;
    without an authentication it admits none. Later endpoints of the same socket are served with keys, too.

    ZeroMQ gets a copy of our listening socket. A socket of its own would remove any file at the path when it closes.

    Raises:
        EndpointError: already served, port in use, no permission, no such directory or address, or other machines
            could reach it and there are no keys. The socket stays open and unbound, and a process that serves the
            endpoint is not disturbed.
    """

    def __init__(
        self, socket: Socket, endpoint: str, own: KeyPair | None = None, role: str = "", max_connections: int = 0
    ) -> None:
        where = parse_endpoint(endpoint)
        if own is None and not is_local(where):
            raise EndpointError(
                f"{endpoint} is reachable from other machines and would accept connections without a key; expected keys"
                " (`outrider keys make`), or an endpoint of this machine such as tcp://127.0.0.1:0"
            )
        if own is not None:
            socket.curve_server, socket.curve_secretkey = True, key_bytes(own.secret)
            socket.zap_domain = role.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # or a context without an authentication admits every key
        self.max_connections, self.open_fds = max_connections, set[int]()
        self._socket = socket
        self._lock = SocketLock(where.path) if isinstance(where, Ipc) else None
        with ExitStack() as cleanup:
            if self._lock is not None:
                cleanup.callback(self._lock.release)
            _set_common_options(socket, where)
            try:
                if isinstance(where, Tcp):
                    address = "" if where.host == "*" else where.host, where.port
                    listener = sockets.create_server(address, family=_address_family(where), backlog=BACKLOG)
                    where = Tcp(where.host, listener.getsockname()[1])
                else:
                    listener = sockets.socket(sockets.AF_UNIX)
                self._listener = cleanup.enter_context(listener)
                listener.setblocking(False)
                if self._lock is not None:
                    self._lock.bind(listener)
                    listener.listen(BACKLOG)
                self.endpoint = str(where)
                socket.use_fd = os.dup(listener.fileno())
                socket.bind(self.endpoint)
                socket.use_fd = -1
            except (OSError, zmq.ZMQError) as error:
                raise listen_error(where, error) from None
            cleanup.pop_all()

    def close_connection(self, descriptor: int) -> None:
        """Closes a connection to this endpoint, unless its descriptor now belongs to another file."""
        with suppress(OSError):
            duplicate = os.dup(descriptor)
            try:
                connection = sockets.socket(fileno=duplicate)
            except OSError:  # it is no socket's
                os.close(duplicate)
                return
            with connection:
                if _path_or_port(connection) == _path_or_port(self._listener):
                    connection.shutdown(sockets.SHUT_RDWR)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket and frees the endpoint; unsent messages have `linger_ms`. A second call does nothing."""
        self._socket.close(linger=linger_ms)
        self._listener.close()
        if self._lock is not None:
            self._lock.release()


def _path_or_port(connection: sockets.socket) -> object:
    """Returns this side's path or port; the host of a listener may stand for all interfaces."""
    name = connection.getsockname()
    return name[1] if isinstance(name, tuple) else name


def _set_common_options(socket: Socket, where: Endpoint) -> None:
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = min(socket.handshake_ivl, HANDSHAKE_TIMEOUT_MS)  # that of `set_remote_options` is shorter
    if isinstance(where, Tcp) and _is_ipv6(where.host):
        socket.ipv6 = True


def listen_error(where: Endpoint | str, error: OSError | UnicodeError | zmq.ZMQError) -> EndpointError:
    """Returns the error that says why nothing can listen there, and what to do."""
    if isinstance(error, sockets.gaierror | UnicodeError):
        return EndpointError(f"{where} can't be used: the host can't be found; check its name")
    reasons = {
        errno.EADDRINUSE: "the port is in use; stop the program that uses it, or choose another port",
        errno.EACCES: "no permission; choose a port from 1024 up, or a directory you may write to",
        errno.EADDRNOTAVAIL: "this machine has no such address; choose one of its addresses, or * for all",
        errno.ENODEV: "this machine has no such address; choose one of its addresses, or * for all",
    }
    return EndpointError(f"{where} can't be used: {reasons.get(error.errno or 0, error.strerror)}")


def set_remote_options(socket: zmq.Socket[Any]) -> None:
    """Sets the options of a socket whose peer is on another machine, since that link can break silently; call it before
    `BoundSocket` or `connect`.

    Both ends send ZeroMQ heartbeats and close a connection that does not answer them. The connecting end then
    reconnects, a few times a second, so a healed link works again at once. TCP alone would need as long again as the
    link was down.
    """
    socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS
    socket.connect_timeout = CONNECT_TIMEOUT_MS
    socket.handshake_ivl = HEARTBEAT_TIMEOUT_MS
    socket.reconnect_ivl = RECONNECT_INTERVAL_MS
    socket.reconnect_ivl_max = MAX_RECONNECT_INTERVAL_MS
    if socket.type == zmq.ROUTER:
        # A peer may reconnect before its old connection is closed here; without this its new one would be refused.
        socket.router_handover = True


def require_server(endpoint: str) -> None:
    """Checks that a local endpoint is served, since ZeroMQ would wait for a server that may still start.

    Raises:
        EndpointError: no server is there, or the host of another machine can't be found.
        ServerBusy: this process has as many open files as it can have.
    """
    where = parse_endpoint(endpoint)
    if isinstance(where, Tcp):
        _resolve_host(where.host)
    if not is_local(where):
        return
    try:
        probe = sockets.socket(_address_family(where))
    except OSError as error:
        raise ServerBusy(f"this process has too many requests in flight ({error}); wait for some to finish") from None
    with probe:
        probe.settimeout(LOCAL_TIMEOUT_SECONDS)
        refusal = probe.connect_ex(where.path if isinstance(where, Ipc) else (where.host, where.port))
    if refusal in _NO_SERVER_ERRNOS:
        why = os.strerror(refusal)
        raise EndpointError(f"no server at {where} ({why}); expected an endpoint that `outrider serve` prints")


@lru_cache
def _resolve_host(host: str) -> set[int]:
    """Returns the families of the host's addresses; a success is cached. Raises EndpointError if it has none."""
    try:
        return {info[0] for info in sockets.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise EndpointError(f"the host {host} can't be found ({error}); check the name, or use its address") from None


def probe(endpoint: str, keys: ClientKeys | None) -> None:
    """Connects once, and returns when a server at `endpoint` has admitted `keys`, so that a peer that finds no server,
    or is refused, gets an error instead of waiting.

    Raises:
        KeyFault: the server refuses the key, has another key than expected, or requires keys and there are none.
        EndpointError: nothing answers.
    """
    with monitored_socket(_HANDSHAKE_EVENTS) as (socket, monitor):
        connect(socket, endpoint, keys)
        for _ in range(2):  # one handshake may have been cut
            if not monitor.poll(int(1000 * PROBE_TIMEOUT_SECONDS)):
                raise EndpointError(
                    f"no answer from {endpoint} within {PROBE_TIMEOUT_SECONDS:g} s; expected a running server there"
                )
            event, _, _ = receive_event(monitor)
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                break
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return
    is_known = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    if not is_known and not _is_greeted(parse_endpoint(endpoint)):
        raise EndpointError(f"{endpoint} closes connections without an answer; expected a running server there")
    if keys is None:
        raise KeyFault(f"{endpoint} requires keys; expected --server-key with the key that the server prints")
    if is_known:
        raise KeyFault(
            f"{endpoint} refuses this side's key {keys.own.public}; allow it on the server (`outrider keys allow`, with"
            " --as for a worker)"
        )
    raise KeyFault(
        f"{endpoint} has a server with another key than {keys.server}; expected the key that `outrider serve` prints"
        " there"
    )


@contextmanager
def monitored_socket(events: int) -> Iterator[tuple[Socket, Socket]]:
    """Yields a socket to connect, and one that receives these events of it; closes both."""
    context: zmq.Context[Any] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket, socket.get_monitor_socket(events) as monitor:
        socket.linger = 0
        try:
            yield socket, monitor
        finally:
            socket.disable_monitor()


def receive_event(monitor: zmq.Socket[Any]) -> tuple[int, int, str]:
    """Returns a socket event's kind, value and endpoint, without `zmq.utils.monitor`, which imports asyncio."""
    frame, endpoint = monitor.recv_multipart()
    event, value = struct.unpack("=hi", frame)
    return event, value, endpoint.decode()


def _is_greeted(where: Endpoint) -> bool:
    """Whether a server answers, as ZeroMQ does at once: a forwarded port accepts connections without one."""
    if isinstance(where, Ipc):
        return True
    try:
        with sockets.create_connection((where.host, where.port), PROBE_TIMEOUT_SECONDS) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False
