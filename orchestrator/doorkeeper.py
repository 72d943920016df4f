"""Serves an endpoint for so many connections at once: when all places are taken it stops listening until one leaves.

ZeroMQ would accept until no file is left and then end the process. Who comes to a shut door waits in the system's own
line and is let in, in turn. Knows connections; knows nothing of messages.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.endpoints import bind

CROWDED = 0.875


class Doorkeeper:
    """Binds `socket` to `endpoint`. Whenever something waits on `monitor`, call `watch`.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, most: int) -> None:
        self._socket = socket
        self._most = most
        self._inside: set[int] = set()  # file descriptors, of which ZeroMQ tells the coming and going
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.bound = bind(socket, endpoint)
        except BaseException:
            self._end_monitor()
            raise

    @property
    def crowded(self) -> bool:
        """Nearly all places are taken: time to turn work away while there is still room to say so."""
        return len(self._inside) >= CROWDED * self._most

    def watch(self) -> None:
        """Takes in who came and went, and shuts or opens the door."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._inside.add(event["value"])
            else:
                self._inside.discard(event["value"])
        if len(self._inside) >= self._most:
            self.bound.stop_listening()
        else:
            self.bound.listen()

    def close(self, linger_ms: int = 0) -> None:
        """Ends the socket and frees the endpoint."""
        self._end_monitor()
        self.bound.close(linger_ms)

    def _end_monitor(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)
