"""Tries an endpoint's door, so that who finds nobody, or is not let in, hears why instead of waiting."""

from __future__ import annotations

import errno
import os
import socket as sockets
from functools import lru_cache
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.endpoints import Endpoint, Ipc, Tcp, connect, parse
from outrider.protocol.errors import EndpointError, KeyFault, OutriderError
from outrider.protocol.keys import ClientKeys

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
    family, address = _knockable(where)
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


def _knockable(where: Endpoint) -> tuple[sockets.AddressFamily, str | tuple[str, int] | None]:
    match where:
        case Ipc(path=path):
            return sockets.AF_UNIX, path
        case Tcp(host="::1", port=port):
            return sockets.AF_INET6, ("::1", port)
        case Tcp(host=host, port=port) if host == "localhost" or host.startswith("127."):
            return sockets.AF_INET, (host, port)
    return sockets.AF_INET, None


def knock(endpoint: str, keys: ClientKeys | None, seconds: float = SECONDS) -> None:
    """Returns when a server at `endpoint` lets in who comes with `keys`.

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
        raise _refused(endpoint, keys, event == zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def _refused(endpoint: str, keys: ClientKeys | None, known: bool) -> OutriderError:
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
