"""The same as `asker`, awaited."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Unpack

from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.client.wish import Prompt, Wish, Wishes
from outrider.protocol.sampling import SamplingParams

Grown = Callable[[Chunk], object]


class AsyncAsker(ABC):
    """`sources`: with how many servers a text may go on; see `Dialogue`."""

    sources: int

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **wishes: Unpack[Wishes]
    ) -> GenerationResult:
        """See `Client.generate`."""
        stream = self.stream(prompt, sampling, **wishes)
        async for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        rounds: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **wishes: Unpack[Wishes],
    ) -> AsyncStream:
        """See `Client.stream`."""
        return AsyncStream(self, Dialogue(Wish.of(prompt, sampling, rounds, wishes), progress, self.sources))

    async def exchange(self, dialogue: Dialogue) -> AsyncIterator[Chunk]:
        """Runs one dialogue to its end; cancels it when the caller leaves early."""
        chunks = asyncio.Queue[Chunk | None]()
        following = asyncio.create_task(self.follow(dialogue, chunks.put_nowait))
        following.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            following.result()
        finally:
            following.cancel()
            await asyncio.wait((following,))

    @abstractmethod
    async def follow(self, dialogue: Dialogue, grown: Grown) -> None:
        """The same, with `grown` hearing of each chunk in the very turn of the loop that brings it."""

    @abstractmethod
    async def end(self, dialogue: Dialogue) -> None:
        """Asks the server to end a dialogue that is going on."""


class AsyncStream:
    """A completion that grows: iterate once with `async for`, then ask for the `result`; or `follow` it.

    A second loop, over a finished or a broken-off stream, is an InvalidRequest.
    """

    def __init__(self, asker: AsyncAsker, dialogue: Dialogue) -> None:
        self._asker = asker
        self._dialogue = dialogue

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._dialogue.begin()
        return self._asker.exchange(self._dialogue)

    async def follow(self, grown: Grown) -> GenerationResult:
        """Reads it to its end instead of a loop: `grown` hears of each chunk as it comes, and must not take long."""
        self._dialogue.begin()
        await self._asker.follow(self._dialogue, grown)
        return self.result

    @property
    def request(self) -> str:
        """What it is called where both sides log it."""
        return self._dialogue.request

    async def end(self) -> None:
        """Asks for no more text. The loop goes on to the end, which is near: `finish_reason` is cancelled then."""
        await self._asker.end(self._dialogue)

    @property
    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: the stream was not read to its end.
        """
        return self._dialogue.result()
