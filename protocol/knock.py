"""Tries an endpoint's door: a handshake and nothing more, so that who is not let in hears why instead of waiting."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, KeyFault, OutriderError
from outrider.protocol.keys import ClientKeys

SECONDS = 3.0
_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


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
        return KeyFault(f"{endpoint} asks for keys; expected the key of its server (--server-key), which prints it")
    if known:
        return KeyFault(
            f"{endpoint} refuses this side's key {keys.own.public}; expected one that is allowed on the server's side"
            " for this (`outrider keys allow`)"
        )
    return KeyFault(
        f"{endpoint} is no server with the key {keys.server}; expected the key that `outrider serve` prints there"
    )
