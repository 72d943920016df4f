"""The Python client for asyncio: the same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
from functools import cached_property

from outrider.orchestrator.client.async_asker import AsyncAsker, Grown
from outrider.orchestrator.client.async_socket import AsyncSocket
from outrider.orchestrator.client.connecting import FLUSH_MS, Connecting
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.protocol.errors import EndpointError, ServerStopped
from outrider.protocol.messages import Message, Stats


class AsyncClient(Connecting, AsyncAsker):
    """A client of the server at `endpoint`; see `Client` for what the calls take, give and raise."""

    @cached_property
    def _open(self) -> dict[str, AsyncSocket]:
        """Of the dialogues that are going on, by request."""
        return {}

    async def stats(self) -> Stats:
        """The server's workers and totals."""
        found: list[Stats] = []

        def hear(answer: Message) -> bool:
            found.extend((answer,) if isinstance(answer, Stats) else ())
            return bool(found)

        patience = self.patience()
        socket = AsyncSocket(self.connected(), hear)
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

        patience = self.patience()
        socket = AsyncSocket(self.connected(), hear)
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
