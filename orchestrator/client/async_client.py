"""The Python client for asyncio: the same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

import zmq

from outrider.orchestrator.client.async_asker import AsyncAsker, Grown
from outrider.orchestrator.client.async_socket import AsyncSocket, Hear
from outrider.orchestrator.client.client import FLUSH_MS
from outrider.orchestrator.client.dialogue import Dialogue, Patience, check_timeout, keys_to
from outrider.orchestrator.client_key import client_key
from outrider.protocol import values
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ServerBusy, ServerStopped
from outrider.protocol.messages import Message, Stats


class AsyncClient(AsyncAsker):
    """A client of the server at `endpoint`; see `Client` for what the calls take, give and raise."""

    def __init__(
        self,
        endpoint: str,
        timeout: float = 10.0,
        alive: Callable[[], None] | None = None,
        reconnect: bool = False,
        server_key: str | None = None,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys_to(endpoint, server_key, keys)
        self.sources = int(values.flag("reconnect", reconnect))
        self.timeout = check_timeout(timeout)
        self._alive = alive
        self._key = client_key()
        self._serials = itertools.count()
        self._open: dict[str, AsyncSocket] = {}

    async def stats(self) -> Stats:
        """The server's workers and totals."""
        found: list[Stats] = []

        def hear(answer: Message) -> bool:
            found.extend((answer,) if isinstance(answer, Stats) else ())
            return bool(found)

        patience = Patience(self.endpoint, self.timeout, self._alive, self._keys)
        socket = self._socket(hear)
        try:
            socket.send(patience.silent())
            await socket.until_over(patience)
        finally:
            socket.close()
        return found[0]

    async def follow(self, dialogue: Dialogue, grown: Grown) -> None:
        while True:
            try:
                await self.once(dialogue, grown)
                return
            except (EndpointError, ServerStopped) as error:
                await asyncio.sleep(dialogue.retry(error))

    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        """What one server says, to its end or the dialogue's; cancels it when the caller leaves early."""

        def hear(message: Message) -> bool:
            chunk = dialogue.take(message)
            if chunk is not None:
                grown(chunk)
            return dialogue.over

        patience = Patience(self.endpoint, self.timeout, self._alive, self._keys)
        socket = self._socket(hear)
        try:
            socket.send(dialogue.opening)
            dialogue.was_sent = True
            self._open[dialogue.request] = socket
            await socket.until_over(patience, dialogue.request)
        finally:
            self._open.pop(dialogue.request, None)
            if not dialogue.over:
                socket.send(dialogue.farewell)
            socket.close(FLUSH_MS)

    async def end(self, dialogue: Dialogue) -> None:
        """Asks the server to end a dialogue that is going on."""
        socket = self._open.get(dialogue.request)
        if socket is not None:
            socket.send(dialogue.farewell)

    def _socket(self, hear: Hear) -> AsyncSocket:
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # each request has one, and there are so many to a process
            raise ServerBusy(f"too many requests of this process are under way ({error}); expected fewer") from None
        socket.setsockopt(zmq.ROUTING_ID, self._key + next(self._serials).to_bytes(4, "big"))
        socket.setsockopt(zmq.LINGER, 0)
        try:
            connect(socket, self.endpoint, self._keys)
        except EndpointError:
            socket.close()
            raise
        return AsyncSocket(socket, hear)
