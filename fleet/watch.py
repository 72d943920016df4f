"""Whether a server that somebody else keeps up is there, and the moment when it is not any more.

ZeroMQ asks the other end below our messages, so one that hangs or whose machine is gone is missed within a second, and
one that ends at once. Owns a connection; knows nothing of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.orchestrator.client.client import Client
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ModelError, ServerBusy, WorkerError
from outrider.protocol.keyring import Keyring
from outrider.protocol.messages import WorkerStats

ASK_MS, SILENT_MS = 300, 900
LOOK_SECONDS = 0.5
COMES, GOES = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class Watch:
    """Of the server at `endpoint`, which lets in the key in the folder `keys`.

    Raises:
        KeyFault: of every method too: it asks for keys, and there are none that it lets in.
    """

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        self._endpoint = endpoint
        self._keys = Keyring(keys).to_reach(endpoint)
        self._client = Client(endpoint, timeout=1.0, keys=keys)

    def wait_until_there(self) -> None:
        """Returns when it serves, its target loaded."""
        while not self._serves():
            time.sleep(LOOK_SECONDS)

    def weights(self) -> str:
        """By what its target's weights and number format are known; empty: it does not answer."""
        return next((one.fingerprint for one in self._workers() if one.role == "target"), "")

    def wait_until_gone(self) -> None:
        """Returns when its connection is lost, or there is none within a second."""
        context: zmq.Context[Any] = zmq.Context.instance()
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.heartbeat_ivl, socket.heartbeat_timeout = ASK_MS, SILENT_MS
            monitor = socket.get_monitor_socket(COMES | GOES)
            try:
                connect(socket, self._endpoint, self._keys)
                if monitor.poll(SILENT_MS):
                    while recv_monitor_message(monitor)["event"] != GOES:
                        pass
            finally:
                socket.disable_monitor()
                monitor.close(linger=0)

    def _serves(self) -> bool:
        return any(worker.role == "target" and worker.state == "ready" for worker in self._workers())

    def _workers(self) -> tuple[WorkerStats, ...]:
        """What it says of them; none while it does not answer."""
        try:
            return self._client.stats().workers
        except (EndpointError, ServerBusy, WorkerError):
            return ()


def check_same_weights(endpoint: str, before: Sequence[str], keys: Path | None) -> None:
    """Raises ModelError where the server at `endpoint` has others than one of those before it, as far as they answer:
    its texts would be another model's, and none could go on with it.
    """
    ours = Watch(endpoint, keys).weights()
    for other in before:
        theirs = Watch(other, keys).weights()
        if ours and theirs and ours != theirs:
            raise ModelError(
                f"the engine at {endpoint} has other weights, or another number format, than the one at {other};"
                " expected the same model on every engine"
            )
