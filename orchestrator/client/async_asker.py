"""The same as `asker`, awaited."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import AsyncGeneratorType, TracebackType
from typing import Any, Self, Unpack, cast

from outrider.orchestrator.client.asker import OpenStreams
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.client.wish import Prompt, Wish, Wishes
from outrider.protocol.sampling import SamplingParams

Grown = Callable[[Chunk], object]


class AsyncAsker(ABC):
    """`sources`: with how many servers a text may go on; see `Dialogue`. `async with` closes it in the end."""

    sources: int

    def __init__(self) -> None:
        self._streams: OpenStreams[AsyncStream] = OpenStreams(type(self).__name__)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the streams that are not finished; no more can be asked for. Again does nothing."""
        for stream in self._streams.close():
            await stream.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **wishes: Unpack[Wishes]
    ) -> GenerationResult:
        """See `Client.generate`."""
        stream = self._stream("generate", prompt, sampling, False, None, wishes)
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
        return self._stream("stream", prompt, sampling, rounds, progress, wishes)

    def _stream(
        self,
        method: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        rounds: bool,
        progress: Callable[[int, int], None] | None,
        wishes: Mapping[str, Any],
    ) -> AsyncStream:
        wish = Wish.of(f"{type(self).__name__}.{method}", prompt, sampling, rounds, wishes)
        return self._streams.add(AsyncStream(self, Dialogue(wish, progress, self.sources)))

    async def exchange(self, dialogue: Dialogue) -> AsyncGenerator[Chunk, None]:
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

    A second loop, over a finished or a broken-off stream, is an InvalidRequest. `async with` closes it in the end.
    """

    def __init__(self, asker: AsyncAsker, dialogue: Dialogue) -> None:
        self._asker = asker
        self._dialogue = dialogue
        self._reading: Callable[[], AsyncGenerator[Chunk, None] | None] = lambda: None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._dialogue.begin()
        reading = self._asker.exchange(self._dialogue)
        self._reading = weakref.ref(reading)
        return reading

    async def close(self) -> None:
        """Cancels the request unless it is finished. Again does nothing. A loop in another task comes to its end."""
        if self._dialogue.is_closed:
            return
        self._dialogue.is_closed = True
        reading = self._reading()
        if reading is None or cast("AsyncGeneratorType[Chunk, None]", reading).ag_running:
            await self.end()  # what another task reads, or `follow`, ends by the server's answer
        else:
            await reading.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncStream: {self._dialogue.state}>"

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
