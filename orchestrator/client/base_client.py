"""The calls of a client, `generate` and `stream`, blocking (`BaseClient`) and awaited (`AsyncBaseClient`).

Whichever server answers; see `client` for those that ask one over ZeroMQ.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from types import AsyncGeneratorType, TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, cast

from outrider.orchestrator.client.dialogue import (
    Chunk,
    Dialogue,
    GenerateFields,
    GenerateRequest,
    GenerationResult,
    Prompt,
)
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

S = TypeVar("S")


class StreamClient(ABC, Generic[S]):
    """What both kinds of clients share: they make streams, which are closed with the client.

    `sources`: with how many servers a text may go on; see `Dialogue`. Safe between threads.
    """

    sources: int

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[S] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        rounds: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **wishes: Unpack[GenerateFields],
    ) -> S:
        """The completion of `prompt` as it grows; see `generate`. Leaving the loop, or `close`, cancels.

        `rounds`: chunks tell of each round, when it has ended. `progress(done, total)` hears how much of a long prompt
        has been read.
        """
        return self.ask(self._request("stream", prompt, sampling, wishes, rounds), progress)

    def _request(
        self,
        method: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        wishes: Mapping[str, Any],
        rounds: bool = False,
    ) -> GenerateRequest:
        return GenerateRequest.of(f"{type(self).__name__}.{method}", prompt, sampling, rounds, wishes)

    def ask(self, request: GenerateRequest, progress: Callable[[int, int], None] | None = None) -> S:
        """The same as `stream`, of a request that has been checked already.

        Raises:
            InvalidRequest: the client is closed.
        """
        stream = self._stream_of(Dialogue(request, progress, self.sources))
        with self._lock:
            if self._is_closed:
                raise InvalidRequest(f"this {type(self).__name__} is closed; create a new one")
            self._streams.add(stream)
        return stream

    def _end_streams(self) -> list[S]:
        """Makes no more; returns those to be closed."""
        with self._lock:
            self._is_closed = True
            return list(self._streams)

    @abstractmethod
    def _stream_of(self, dialogue: Dialogue) -> S: ...


class BaseStream:
    """What both kinds of streams say of their text."""

    _dialogue: Dialogue

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._dialogue.state}>"

    @property
    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: the stream was not read to its end.
        """
        return self._dialogue.result()


class BaseClient(StreamClient["Stream"]):
    """A client whose calls block. A context manager: leaving it closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the streams that are not finished, in all threads; no more can be asked for. Again does nothing."""
        for stream in self._end_streams():
            stream.close()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **wishes: Unpack[GenerateFields]
    ) -> GenerationResult:
        """The completion of `prompt`: text, or token ids as a list, a tuple or a numpy array.

        Keywords: the fields of `SamplingParams`, which go before those of `sampling`, and
            mode: ar, sd, ssd, or auto, the default: the server's own.
            num_draft_tokens, branches: K and B; None, the default: the server's own.
            chat_template: False: a model's is not applied to text.
            origins: True: tell where each token came from.
            drafter: the name of the only one that is to draft (draft, ngram, or a head's, as eagle3).
            client: for whom it is, where a program asks for many people: they take turns at the server as if each asked
                alone.

        Raises:
            InvalidRequest: something is out of range; the message says what was expected.
            EndpointError: nothing answers.
            WorkerError: a worker was lost on the way.
        """
        stream = self.ask(self._request("generate", prompt, sampling, wishes))
        for _ in stream:
            pass
        return stream.result

    def _stream_of(self, dialogue: Dialogue) -> Stream:
        return Stream(self, dialogue)

    @abstractmethod
    def exchange(self, dialogue: Dialogue) -> Generator[Chunk, None, None]:
        """Runs one dialogue to its end; cancels it when the caller leaves early."""


class Stream(BaseStream):
    """A completion that grows: iterate once for its chunks, then ask for the `result`.

    A second loop, over a finished or a broken-off stream, is an InvalidRequest. `with` closes it in the end.
    """

    def __init__(self, client: BaseClient, dialogue: Dialogue) -> None:
        self._client = client
        self._dialogue = dialogue
        self._reading: Callable[[], Generator[Chunk, None, None] | None] = lambda: None

    def __iter__(self) -> Iterator[Chunk]:
        self._dialogue.begin()
        reading = self._client.exchange(self._dialogue)
        self._reading = weakref.ref(reading)  # the loop's own: when the loop is left it ends, and with it the request
        return reading

    def close(self) -> None:
        """Cancels the request unless it is finished. Again does nothing.

        A loop in another thread ends with the next chunk, or within a second where none comes.
        """
        self._dialogue.is_closed = True
        reading = self._reading()
        if reading is not None:
            with suppress(ValueError):  # another thread waits in it, and looks at `is_closed`
                reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Grown = Callable[[Chunk], object]


class AsyncBaseClient(StreamClient["AsyncStream"]):
    """A client whose calls are awaited. `async with` closes it in the end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the streams that are not finished; no more can be asked for. Again does nothing."""
        for stream in self._end_streams():
            await stream.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **wishes: Unpack[GenerateFields]
    ) -> GenerationResult:
        """See `Client.generate`."""
        stream = self.ask(self._request("generate", prompt, sampling, wishes))
        async for _ in stream:
            pass
        return stream.result

    def _stream_of(self, dialogue: Dialogue) -> AsyncStream:
        return AsyncStream(self, dialogue)

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


class AsyncStream(BaseStream):
    """A completion that grows: iterate once with `async for`, then ask for the `result`; or `follow` it.

    A second loop, over a finished or a broken-off stream, is an InvalidRequest. `async with` closes it in the end.
    """

    def __init__(self, client: AsyncBaseClient, dialogue: Dialogue) -> None:
        self._client = client
        self._dialogue = dialogue
        self._reading: Callable[[], AsyncGenerator[Chunk, None] | None] = lambda: None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._dialogue.begin()
        reading = self._client.exchange(self._dialogue)
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

    async def follow(self, grown: Grown) -> GenerationResult:
        """Reads it to its end instead of a loop: `grown` hears of each chunk as it comes, and must not take long."""
        self._dialogue.begin()
        await self._client.follow(self._dialogue, grown)
        return self.result

    @property
    def request(self) -> str:
        """What it is called where both sides log it."""
        return self._dialogue.request

    async def end(self) -> None:
        """Asks for no more text. The loop goes on to the end, which is near: `finish_reason` is cancelled then."""
        await self._client.end(self._dialogue)
