"""Where a client's server is, how it is reached, and for how long it may keep silent: the same for both clients."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Never

import zmq

from outrider.orchestrator.client.patience import Patience
from outrider.orchestrator.client_key import client_key
from outrider.protocol import values
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ServerBusy
from outrider.protocol.keyring import Keyring
from outrider.protocol.keys import ClientKeys

FLUSH_MS = 1000


class Connecting:
    """A client of the server at `endpoint`; see `Client`.

    Each call has a socket of its own, so calls don't wait for each other here; the server queues them fairly by client.
    """

    def __init__(
        self,
        endpoint: str,
        timeout: float = 10.0,
        alive: Callable[[], None] | None = None,
        reconnect: bool = False,
        server_key: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            known = ("endpoint", "timeout", "alive", "reconnect", "server_key", "keys")
            raise values.unknown_keyword(type(self).__name__, unknown, known)
        super().__init__()
        self.endpoint = endpoint
        self.sources = int(values.flag("reconnect", reconnect))
        self.timeout = values.number("timeout", timeout, 0.001, math.inf)
        self._keys = keys_to(endpoint, server_key, keys)
        self._alive = alive
        self._key = client_key()
        self._serials = itertools.count()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r})"

    def patience(self) -> Patience:
        """Raises EndpointError: nobody serves the endpoint."""
        return Patience(self.endpoint, self.timeout, self._alive, self._keys)

    def connected(self) -> zmq.Socket[bytes]:
        """A socket of its own.

        Raises:
            ServerBusy: this process can have no more.
            EndpointError: there is no way to the endpoint.
        """
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # each request has one, and there are so many to a process
            raise ServerBusy(
                f"this process has too many requests in flight ({error}); wait for some to finish"
            ) from None
        socket.setsockopt(zmq.ROUTING_ID, self._key + next(self._serials).to_bytes(4, "big"))
        socket.setsockopt(zmq.LINGER, 0)
        try:
            connect(socket, self.endpoint, self._keys)
        except EndpointError:
            socket.close()
            raise
        return socket


def keys_to(endpoint: str, server_key: str | None, folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """The keys that a client needs there; None: it needs none.

    Raises:
        KeyFault: it does, and one is missing or can't be used.
        EndpointError: it is no endpoint.
    """
    return Keyring(Path(folder) if folder is not None else None).to_reach(endpoint, server_key)
