"""Serves an endpoint for so many connections at once: when all places are taken it stops listening until one leaves.

ZeroMQ would accept until no file is left and then end the process. Who comes to a shut door waits in the system's own
line and is let in, in turn; at a port, which can't be shut, who is one too many is hung up on, and may try again. Knows
connections; knows nothing of messages.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from outrider.protocol.endpoints import Bound, bind
from outrider.protocol.keys import ServerKeys

CROWDED = 0.875


class Door:
    """An endpoint, and who came in by it: file descriptors, of whose coming and going ZeroMQ tells."""

    def __init__(self, bound: Bound, most: int) -> None:
        self.bound = bound
        self.inside: set[int] = set()
        self.most = most

    @property
    def crowded(self) -> bool:
        return len(self.inside) >= CROWDED * self.most

    def enter(self, descriptor: int) -> None:
        """Somebody came in. At a port, which can't be shut, who is one too many is sent out again."""
        self.inside.add(descriptor)
        if len(self.inside) > self.most:
            self.bound.hang_up(descriptor)

    def keep(self) -> None:
        """Shuts or opens it."""
        if len(self.inside) >= self.most:
            self.bound.stop_listening()
        else:
            self.bound.listen()


class Doorkeeper:
    """Binds `socket` to `endpoint`. Whenever something waits on `monitor`, call `watch`.

    Raises:
        EndpointError: the endpoint can't be served.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, most: int, keys: ServerKeys | None = None) -> None:
        self._socket = socket
        self.doors: list[Door] = []
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.bound = self.open(endpoint, most, keys)
        except BaseException:
            self._end_monitor()
            raise

    def open(self, endpoint: str, most: int, keys: ServerKeys | None = None) -> Bound:
        """One more door, with places of its own, so that those who crowd at one keep nobody from another.

        Doors without keys come first; see `bind`.
        """
        bound = bind(self._socket, endpoint, keys)
        self.doors.append(Door(bound, most))
        return bound

    @property
    def crowded(self) -> bool:
        """Nearly all places are taken: time to turn work away while there is still room to say so."""
        return any(door.crowded for door in self.doors)

    def watch(self) -> None:
        """Takes in who came and went, and shuts or opens the doors."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._at(event["endpoint"].decode()).enter(event["value"])
            else:
                for door in self.doors:
                    door.inside.discard(event["value"])
        for door in self.doors:
            door.keep()

    def close(self, linger_ms: int = 0) -> None:
        """Ends the socket and frees the endpoints."""
        self._end_monitor()
        for door in self.doors:
            door.bound.close(linger_ms)

    def _at(self, endpoint: str) -> Door:
        """The door there; ZeroMQ may spell an address in its own way, of which there is at most one."""
        return next((door for door in self.doors if door.bound.endpoint == endpoint), self.doors[-1])

    def _end_monitor(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(linger=0)
