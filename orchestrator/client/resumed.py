"""Texts that outlive their server: where one goes away, the next goes on at the token where it broke off.

It is the same text, because its noise is a function of seed and position; who runs another model or computes in other
numbers refuses to go on with it. Knows clients and dialogues; no socket.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from outrider.orchestrator.client.asker import Asker
from outrider.orchestrator.client.async_asker import AsyncAsker, Grown
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.client.result import Chunk
from outrider.protocol.errors import EndpointError, InvalidRequest, OtherModel, ServerBusy, WorkerError

SEEDS = 2**32
MOVES_ON = (EndpointError, WorkerError, ServerBusy, OtherModel)
"""After these the next server is asked."""

C = TypeVar("C", Client, AsyncClient)


class _Sources(Generic[C]):
    """Servers in turn; the one that answered last is asked first."""

    def __init__(self, clients: Sequence[C]) -> None:
        if not clients:
            raise InvalidRequest("Resumed needs at least one client")
        self.all: list[C] = list(clients)
        self._at = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def present(self) -> C:
        found: C = self.all[self._at % len(self)]
        return found

    def lost(self, client: C) -> None:
        """The next one is to be asked, unless another request has found that out already."""
        if client is self.present:
            self._at += 1


class Resumed(Asker):
    """Asks the first of `clients`; a text that it can't finish goes on with the next, again and again.

    Their `timeout` is how long a server that is asked whether it is there may keep silent: a second is enough. Raises
    what the last of them said where none can go on.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        super().__init__()
        self._sources: _Sources[Client] = _Sources(clients)
        self.sources = len(self._sources)

    def __repr__(self) -> str:
        return f"Resumed({self._sources.all!r})"

    def exchange(self, dialogue: Dialogue) -> Generator[Chunk, None, None]:
        _draw_seed(dialogue)
        while not dialogue.is_closed:
            client = self._sources.present
            try:
                yield from client.once(dialogue)
                return
            except MOVES_ON as error:
                self._sources.lost(client)
                time.sleep(dialogue.retry(error))


class AsyncMoving(AsyncAsker):
    """Asks one server after another until a text is complete; which, says whoever this is."""

    async def follow(self, dialogue: Dialogue, grown: Grown) -> None:
        _draw_seed(dialogue)
        while True:
            try:
                await self.once(dialogue, grown)
                return
            except MOVES_ON as error:
                await asyncio.sleep(dialogue.retry(error))

    @abstractmethod
    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        """What the next server says, to the text's end or to its own."""


class AsyncResumed(AsyncMoving):
    """The same as `Resumed` for asyncio."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        super().__init__()
        self._sources: _Sources[AsyncClient] = _Sources(clients)
        self.sources = len(self._sources)

    def __repr__(self) -> str:
        return f"AsyncResumed({self._sources.all!r})"

    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        client = self._sources.present
        try:
            await client.once(dialogue, grown)
        except MOVES_ON:
            self._sources.lost(client)
            raise

    async def end(self, dialogue: Dialogue) -> None:
        for client in self._sources.all:
            await client.end(dialogue)


def _draw_seed(dialogue: Dialogue) -> None:
    """Who asks first draws the seed: a second server would draw one of its own."""
    sampling = dialogue.opening.sampling
    if sampling.seed is None:
        dialogue.opening = replace(dialogue.opening, sampling=replace(sampling, seed=secrets.randbelow(SEEDS)))
