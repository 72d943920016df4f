"""Where processes meet: `ipc://PATH` on one machine, `tcp://HOST:PORT` between machines.

Owns the form of an endpoint, which process serves it, and that nothing goes to other machines without keys. ZeroMQ
would cut a port to 16 bits, take an ipc path from a live server, replace any file that lies there, and connect to
anybody unencrypted; `bind` and `connect` refuse instead, in one sentence.

`prepare`: the options of a socket whose peer is on another machine, where a link may break silently. Both ends send
heartbeats below our messages and close a connection that does not answer them. Then the connecting end tries again, a
few times a second, so a healed link is back within that time. TCP alone would take as long again as the cut lasted.

`probe`: connects once, so that a peer that finds no server, or is refused, learns why instead of waiting.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket as sockets
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.errors import EndpointError, KeyFault, OutriderError
from outrider.protocol.keys import ClientKeys, Keyring, ServerKeys, parse_key, raw
from outrider.protocol.schema import MAX_FRAME
from outrider.protocol.socket_files import MAX_PATH, SocketLock

Socket: TypeAlias = zmq.Socket[Any]

HANDSHAKE_MS = 10_000
"""Whoever connects and does not say so long what every ZeroMQ peer says first is hung up on."""
BACKLOG = 128
"""Connections that the system keeps in line until they are accepted."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253})")


@dataclass(frozen=True, slots=True)
class Ipc:
    """A unix socket at an absolute path."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host name or address and a port. To bind only: host `*` is every interface, port 0 any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


Endpoint: TypeAlias = Ipc | Tcp


def parse(text: str) -> Endpoint:
    """The endpoint that `text` writes; a relative ipc path is taken from the current directory.

    Raises:
        EndpointError: no endpoint, a port out of range, or a path too long for a unix socket.
    """
    scheme, _, rest = text.partition("://")
    if scheme == "ipc":
        return _parse_ipc(text, rest)
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    if scheme in ("http", "https"):
        raise EndpointError(
            f"{text} is an HTTP address, which curl and the clients of OpenAI's and Anthropic's APIs take; expected the"
            " server's own endpoint, which `outrider serve` prints as `clients:`, like ipc:///tmp/outrider"
        )
    raise EndpointError(f"{text!r} is not an endpoint; expected ipc://PATH or tcp://HOST:PORT")


def _parse_ipc(text: str, path: str) -> Ipc:
    if not path or path[0] in "@*" or path.endswith("/") or not path.isprintable():
        raise EndpointError(
            f"{text!r} names no file; expected ipc:// and the path of a socket, like ipc:///tmp/outrider"
        )
    path = os.path.abspath(path)
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise EndpointError(
            f"the socket path {path} has {length} bytes; this system allows {MAX_PATH}: choose a shorter directory"
        )
    return Ipc(path)


def _parse_tcp(text: str, rest: str) -> Tcp:
    host, _, port = rest.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise EndpointError(f"{text!r} has no port from 0 to 65535; expected tcp://HOST:PORT")
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return Tcp(host[1:-1], int(port))
    if host != "*" and not _HOST.fullmatch(host):
        raise EndpointError(f"{text!r} names no host; expected a name, an IPv4 address, an IPv6 address in [] or *")
    return Tcp(host, int(port))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_local(where: Endpoint) -> bool:
    """Whether only this machine can reach it; a name other than localhost counts as another machine's."""
    if isinstance(where, Ipc) or where.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(where.host).is_loopback
    except ValueError:
        return False


def reachable(endpoint: str) -> Endpoint:
    """As `parse`; EndpointError also for what can only be served."""
    where = parse(endpoint)
    if isinstance(where, Tcp) and (where.host == "*" or where.port == 0):
        raise EndpointError(
            f"{endpoint} is an address to listen on, not to connect to; expected the server's host and port"
        )
    return where


def keys_to(
    endpoint: str, server_key: str | None = None, folder: str | os.PathLike[str] | None = None
) -> ClientKeys | None:
    """The keys that a connection to `endpoint` needs; None: it is on this machine, and no key of its server is known.

    `server_key`: the key that the server must have; None: the trusted one. `folder`: see `Keyring`.

    Raises:
        KeyFault: a key is missing or can't be used.
        EndpointError: it is no endpoint.
    """
    where, keyring = reachable(endpoint), Keyring(Path(folder) if folder is not None else None)
    host = where.host if isinstance(where, Tcp) else endpoint
    known = parse_key(server_key) if server_key is not None else None
    if known is None and isinstance(where, Tcp):
        trusted = {server.place: server.key for server in keyring.servers()}
        known = trusted.get(str(where).removeprefix("tcp://"), trusted.get(host))
    if known is not None:
        return ClientKeys(keyring.own(), known)
    if is_local(where):
        return None
    raise KeyFault(
        f"{endpoint} is on another machine, and its server's key is not trusted yet; expected"
        f" `outrider keys trust {host} KEY` (or --server-key), with the key that `outrider serve` prints there"
    )


def connect(socket: Socket, endpoint: str, keys: ClientKeys | None = None) -> None:
    """Connects `socket`; whoever serves the endpoint may come later, and has to have the key of `keys`.

    Raises:
        EndpointError: nobody can be reached there, or it is on another machine and there are no `keys`.
    """
    where = reachable(endpoint)
    if keys is None and not is_local(where):
        raise EndpointError(f"{endpoint} is on another machine; expected the keys of both sides (`outrider keys`)")
    _prepare(socket, where)
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = raw(keys.own.public), raw(keys.own.secret)
        socket.curve_serverkey = raw(keys.server)
    try:
        socket.connect(str(where))
    except zmq.ZMQError as error:
        raise _refused(where, error) from None


class Bound:
    """A socket that serves an endpoint; `close` ends both and leaves no file. Also a context manager.

    The listening socket is ours and lent to ZeroMQ, which would remove whatever lies at the path in the end.
    """

    def __init__(self, socket: Socket, where: Endpoint, listener: sockets.socket, lock: SocketLock | None) -> None:
        self.endpoint = str(where)
        self.lock = lock
        self._socket = socket
        self._listener = listener
        socket.use_fd = os.dup(listener.fileno())
        socket.bind(self.endpoint)
        socket.use_fd = -1

    def listen(self) -> None:
        """Lets connections in, as it does from the start. Again does nothing."""
        if self.lock is not None:
            self.lock.open()

    def stop_listening(self) -> None:
        """New connections wait until `listen`. Only at a path: from a port ZeroMQ would drop all connections."""
        if self.lock is not None:
            self.lock.shut()

    def hang_up(self, descriptor: int) -> None:
        """Ends a connection that came in by this port. Its number may be another's by now, whose it is not to end."""
        with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as one:
            if self.lock is None and one.getsockname()[1:2] == self._listener.getsockname()[1:2]:
                one.shutdown(sockets.SHUT_RDWR)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket (messages not yet sent get `linger_ms`), then frees the endpoint. Again does nothing."""
        self._socket.close(linger=linger_ms)
        self._listener.close()
        if self.lock is not None:
            self.lock.release()

    def __enter__(self) -> Bound:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bind(socket: Socket, endpoint: str, keys: ServerKeys | None = None) -> Bound:
    """Serves `endpoint` with `socket`; `Bound.endpoint` is the same with a port of 0 filled in.

    With `keys` it admits the keys that its context's authentication allows, and none where there is none. What the same
    socket is bound to later is served with keys, too.

    Raises:
        EndpointError: already served, port in use, no permission, no such directory or address, or other machines
            could reach it and there are no `keys`. The socket stays open and unbound, and whatever serves the endpoint
            now is not disturbed.
    """
    where = parse(endpoint)
    if keys is None and not is_local(where):
        raise EndpointError(
            f"{endpoint} is reachable from other machines and would accept connections without a key; expected keys"
            " (`outrider keys make`), or an endpoint of this machine such as tcp://127.0.0.1:0"
        )
    if keys is not None:
        _ask_for_keys(socket, keys)
    with ExitStack() as undone:
        lock = SocketLock(where.path) if isinstance(where, Ipc) else None
        if lock is not None:
            undone.callback(lock.release)
        _prepare(socket, where)
        try:
            made = _at_port(where) if isinstance(where, Tcp) else sockets.socket(sockets.AF_UNIX)
            listener = undone.enter_context(made)
            listener.setblocking(False)
            if isinstance(where, Tcp):
                where = Tcp(where.host, listener.getsockname()[1])
            if lock is not None:
                lock.bind(listener)
                listener.listen(BACKLOG)
            bound = Bound(socket, where, listener, lock)
        except (OSError, zmq.ZMQError) as error:
            raise _refused(where, error) from None
        undone.pop_all()
    return bound


def _at_port(where: Tcp) -> sockets.socket:
    family = sockets.AF_INET6 if ":" in where.host else sockets.AF_INET
    host = "" if where.host == "*" else where.host
    return sockets.create_server((host, where.port), family=family, backlog=BACKLOG)


def _ask_for_keys(socket: Socket, keys: ServerKeys) -> None:
    socket.curve_server, socket.curve_secretkey = True, raw(keys.own.secret)
    socket.zap_domain = keys.domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it a context that has no authentication lets everybody in


def _prepare(socket: Socket, where: Endpoint) -> None:
    socket.maxmsgsize = MAX_FRAME
    socket.handshake_ivl = HANDSHAKE_MS
    if isinstance(where, Tcp) and ":" in where.host:
        socket.ipv6 = True


def _refused(where: Endpoint, error: OSError | zmq.ZMQError) -> EndpointError:
    reasons = {
        errno.EADDRINUSE: "the port is in use; stop what uses it or choose another (0 takes any free one)",
        errno.EACCES: "no permission; choose a port from 1024 on, or a directory you may write to",
        errno.EADDRNOTAVAIL: "this machine has no such address; choose one of its own, or * for all of them",
        errno.ENODEV: "this machine has no such address; choose one of its own, or * for all of them",
        errno.EINVAL: "the host can't be found; check its name",
    }
    reason = reasons[errno.EINVAL] if isinstance(error, sockets.gaierror) else reasons.get(error.errno or 0)
    return EndpointError(f"{where} can't be used: {reason or error.strerror}")


ASK_MS = 500
GIVE_UP_MS = 2000
"""A packet that is lost is sent again after some 200 ms, then after 400: a link that works is never silent so long."""
CONNECT_MS = 1000
AGAIN_MS, AGAIN_MOST_MS = 100, 400


def prepare(socket: zmq.Socket[Any]) -> None:
    """Before it is bound or connected; what was before keeps to what it was made with."""
    socket.heartbeat_ivl = ASK_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = GIVE_UP_MS
    socket.connect_timeout = CONNECT_MS
    socket.handshake_ivl = GIVE_UP_MS
    socket.reconnect_ivl = AGAIN_MS
    socket.reconnect_ivl_max = AGAIN_MOST_MS
    if socket.type == zmq.ROUTER:
        # Who comes again may come before its first connection is missed here; without this it would not be heard.
        socket.router_handover = True


SECONDS = 3.0
AT_ONCE_SECONDS = 0.2
_NOBODY = (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EACCES)
_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def require_server(endpoint: str) -> None:
    """Knocks, where that is known at once: ZeroMQ itself waits for a server that may still come.

    Raises:
        EndpointError: it is certain that nobody can be reached there now. A server elsewhere is taken on trust, if its
            host can be found.
    """
    where = parse(endpoint)
    if isinstance(where, Tcp):
        _find(where.host)
    family, address = _can_probe(where)
    if address is None:
        return
    with sockets.socket(family) as probe:
        probe.settimeout(AT_ONCE_SECONDS)
        refusal = probe.connect_ex(address)
    if refusal in _NOBODY:
        why = os.strerror(refusal)
        raise EndpointError(f"no server at {where} ({why}); expected an endpoint that `outrider serve` prints")


@lru_cache
def _find(host: str) -> None:
    """Looks for the host's address; once it was found, that is taken to be so."""
    try:
        sockets.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise EndpointError(f"the host {host} can't be found ({error}); check the name, or use its address") from None


def _can_probe(where: Endpoint) -> tuple[sockets.AddressFamily, str | tuple[str, int] | None]:
    match where:
        case Ipc(path=path):
            return sockets.AF_UNIX, path
        case Tcp(host="::1", port=port):
            return sockets.AF_INET6, ("::1", port)
        case Tcp(host=host, port=port) if host == "localhost" or host.startswith("127."):
            return sockets.AF_INET, (host, port)
    return sockets.AF_INET, None


def probe(endpoint: str, keys: ClientKeys | None, seconds: float = SECONDS) -> None:
    """Returns when a server at `endpoint` admits `keys`.

    Raises:
        KeyFault: it refuses the key, has another one than it should, or asks for one and there is none.
        EndpointError: nothing answers.
    """
    context: zmq.Context[Any] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        monitor = socket.get_monitor_socket(_ENDS)
        try:
            connect(socket, endpoint, keys)
            if not monitor.poll(int(1000 * seconds)):
                raise EndpointError(f"nothing answers at {endpoint} for {seconds:g} s; expected a running server there")
            event = recv_monitor_message(monitor)["event"]
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
    if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
        raise _no_server(endpoint, keys, event == zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def _no_server(endpoint: str, keys: ClientKeys | None, known: bool) -> OutriderError:
    if keys is None:
        return KeyFault(f"{endpoint} requires keys; expected --server-key with the key that the server prints")
    if known:
        return KeyFault(
            f"{endpoint} refuses this side's key {keys.own.public}; allow it on the server"
            " for this (`outrider keys allow`)"
        )
    return KeyFault(
        f"{endpoint} has a server with another key than {keys.server}; expected the key that `outrider"
        " serve` prints there"
    )
