"""The socket that workers speak to: frames in and out, never waiting for anybody.

What does not fit is dropped, since what matters is asked again. Knows routing ids and keys, not whose they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from outrider.orchestrator.allowance import Allowance, Rate
from outrider.orchestrator.doorkeeper import Doorkeeper
from outrider.protocol import clock
from outrider.protocol.codec import encode_all
from outrider.protocol.messages import Message

log = logging.getLogger(__name__)

# A worker has two; the rest is for strangers, until they are turned away.
MAX_CONNECTIONS = 256
# Messages that wait for a worker that does not read, or for this process.
MOST_WAITING = 1024
# So much is worth a warning, so that nobody fills a log: one in ten seconds, after some at once.
WARNINGS = Rate(0.1, 10)


class WorkerRouter:
    """A ROUTER with a doorkeeper; `socket` and `door.monitor` are what to poll."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self.socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self.door = Doorkeeper(self.socket, endpoint, MAX_CONNECTIONS)
        self._warnings = Allowance(WARNINGS)

    def receive(self) -> Iterator[tuple[zmq.Frame, list[bytes]]]:
        """What waits: the sender's routing id, which also knows its key (`key_shown`), and frames; never blocks."""
        while True:
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield first, self.socket.recv_multipart()

    def send(self, identity: bytes, *messages: Message) -> None:
        """Dropped where the worker is gone, or does not read: what matters is asked again."""
        frames = encode_all(messages)
        try:
            self.socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self.warn("a worker has %d unread messages, the maximum; later ones are lost", MOST_WAITING)
            return
        for frame in frames[:-1]:
            self.socket.send(frame, zmq.SNDMORE)
        self.socket.send(frames[-1])

    def warn(self, told: str, *values: object) -> None:
        """What others can bring about as often as they like fills no log."""
        level = logging.WARNING if self._warnings.takes(b"", (), clock.now()) else logging.INFO
        log.log(level, told, *values)
