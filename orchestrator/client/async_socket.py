"""A ZeroMQ socket in asyncio: its messages are taken in as they come, and wait here for their reader.

ZeroMQ's own sockets for asyncio (`zmq.asyncio`) cost some futures and polls for each message.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import zmq

from outrider.orchestrator.client.dialogue import Patience
from outrider.orchestrator.client.line import Line
from outrider.protocol.codec import encode
from outrider.protocol.messages import Message

HAS_COME = int(zmq.POLLIN)
"""As a number: what Python does with flags takes longer than asking."""

Frames = list[bytes]


class AsyncSocket:
    """Owns `socket`, which is connected, until it is closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._line = Line[Frames]()
        self._loop = asyncio.get_running_loop()
        self._file = socket.FD
        self._loop.add_reader(self._file, self._take_in)

    def send(self, message: Message) -> None:
        """At once: there is always room for the few things that a client says, unless the server lets nobody in."""
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._take_in()  # sending, too, takes the sign off the file that something has come

    async def receive(self, patience: Patience, about: str | None = None) -> list[Frames]:
        """What has come, each a message's frames; asks the server `about` a request where it is silent.

        Raises:
            OutriderError: `patience` is over.
        """
        while not (arrived := await self._line.take(patience.poll_ms / 1000)):
            self.send(await asyncio.to_thread(patience.silent, about))
        patience.heard()
        return arrived

    def close(self, linger_ms: int = 0) -> None:
        """What was sent and has not left yet has so many milliseconds to do so."""
        self._loop.remove_reader(self._file)
        self._line.close()
        self._socket.close(linger_ms)

    def _take_in(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & HAS_COME:
            self._line.put(self._socket.recv_multipart(zmq.NOBLOCK))
