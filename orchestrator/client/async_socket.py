"""A ZeroMQ socket in asyncio: each message is heard as it comes, in the loop's own turn, until one is the last.

ZeroMQ's own sockets for asyncio (`zmq.asyncio`) cost some futures and polls for each message, and a task that waits for
each message another turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

from outrider.orchestrator.client.patience import Patience
from outrider.protocol.codec import decode_all, encode
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Message

HAS_COME, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As numbers: what Python does with flags takes longer than asking."""

Hear = Callable[[Message], bool]
"""What to do with a message; whether it is the last."""


class AsyncSocket:
    """Owns `socket`, which is connected, until it is closed."""

    def __init__(self, socket: zmq.Socket[bytes], hear: Hear) -> None:
        self._socket = socket
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._fault: Exception | None = None
        self._is_silent = True
        self._file = socket.FD
        self._polled = [(socket, HAS_COME)]
        self._loop.add_reader(self._file, self._take_in)

    def send(self, message: Message) -> None:
        """At once: there is always room for the few things that a client says, unless the server lets nobody in."""
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._take_in()  # sending, too, takes the sign off the file that something has come

    async def until_over(self, patience: Patience, about: str | None = None) -> None:
        """Returns when the last message has been heard; asks the server `about` a request where it is silent.

        Raises:
            OutriderError: `patience` is over, what came is no message, or whoever hears it raised this.
        """
        while not self._over.done():
            self._is_silent = True
            await asyncio.wait((self._over,), timeout=patience.poll_ms / 1000)
            if not self._is_silent:
                patience.heard()
            elif not self._over.done():
                self.send(await asyncio.to_thread(patience.silent, about))
        if self._fault is not None:
            raise self._fault

    def close(self, linger_ms: int = 0) -> None:
        """What was sent and has not left yet has so many milliseconds to do so."""
        self._loop.remove_reader(self._file)
        self._over.cancel()
        self._socket.close(linger_ms)

    def _take_in(self) -> None:
        """Frame by frame: messages tell where they end, and ZeroMQ asked for that costs half of what receiving does."""
        frames: list[bytes] = []
        while zmq.zmq_poll(self._polled, 0):
            frames.append(self._socket.recv(AT_ONCE))
        if frames:
            self._is_silent = False
            if not self._over.done():
                self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        is_last = True
        try:
            is_last = any(map(self._hear, decode_all(frames)))
        except OutriderError as error:
            self._fault = error  # whoever waits for the end raises it
        except Exception as error:
            self._fault = error
            raise
        finally:
            if is_last:
                self._over.set_result(None)
