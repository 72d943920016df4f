"""The calls of a client, `generate` and `stream`: blocking in `BaseClient`, awaited in `AsyncBaseClient`.

Knows nothing of connections; `client` has the clients that connect over ZeroMQ.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from types import AsyncGeneratorType, TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack, cast

from outrider.orchestrator.client.dialogue import (
    Chunk,
    Dialogue,
    GenerateFields,
    GenerateRequest,
    GenerationResult,
    Prompt,
)
from outrider.protocol.errors import EndpointError, InvalidRequest, OutriderError, ServerStopped
from outrider.protocol.sampling import SamplingParams

S = TypeVar("S")


class StreamClient(ABC, Generic[S]):
    """What blocking and awaited clients share: they create streams, and close them when they are closed.

    `sources`: the number of servers that may continue a text; see `Dialogue`. `moves_on`: the errors after which the
    next one is tried. Thread-safe.
    """

    sources: int
    moves_on: ClassVar[tuple[type[OutriderError], ...]] = (EndpointError, ServerStopped)

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
        **options: Unpack[GenerateFields],
    ) -> S:
        """Streams the completion of `prompt`; see `generate`. Leaving the loop, or `close`, cancels the request.

        `rounds`: chunks have a record of each finished round. `progress(done, total)` is called with the number of
        prompt tokens read so far, while a long prompt is read.
        """
        return self.ask(self._request("stream", prompt, sampling, options, rounds), progress)

    def _request(
        self,
        method: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        options: Mapping[str, Any],
        rounds: bool = False,
    ) -> GenerateRequest:
        return GenerateRequest.of(f"{type(self).__name__}.{method}", prompt, sampling, rounds, options)

    def ask(self, request: GenerateRequest, progress: Callable[[int, int], None] | None = None) -> S:
        """Streams the completion of a checked request.

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
        """Refuses new streams from now on; returns the streams to close."""
        with self._lock:
            self._is_closed = True
            return list(self._streams)

    @abstractmethod
    def _stream_of(self, dialogue: Dialogue) -> S: ...


class BaseStream:
    """The state and result of a stream, blocking or awaited."""

    _dialogue: Dialogue

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._dialogue.state}>"

    @property
    def result(self) -> GenerationResult:
        """The finished completion. Raises InvalidRequest if the stream was not read to its end."""
        return self._dialogue.result()


class BaseClient(StreamClient["Stream"]):
    """A client whose calls block. A context manager, which closes it on exit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the unfinished streams of all threads, and refuses new ones. A second call does nothing."""
        for stream in self._end_streams():
            stream.close()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[GenerateFields]
    ) -> GenerationResult:
        """Returns the completion of `prompt`: text, or token ids as a list, a tuple or a numpy array.

        Keywords: the fields of `SamplingParams`, which override those of `sampling`, and
            mode: ar, sd, ssd, or auto for the server's own. Default: auto.
            num_draft_tokens, branches: K and B; None for the server's own. Default: None.
            chat_template: whether the model's chat template is applied to text. Default: True.
            origins: whether the result has the origin of each token. Default: False.
            drafter: the only drafter to use (draft, ngram, or a head's name, such as eagle3). Default: all.
            client: a name for the user of a program that serves several; the server takes turns between the names.

        Raises:
            InvalidRequest: a value is out of range; the message says what was expected.
            EndpointError: nothing answers.
            WorkerError: a worker was lost during the request.
        """
        stream = self.ask(self._request("generate", prompt, sampling, options))
        for _ in stream:
            pass
        return stream.result

    def _stream_of(self, dialogue: Dialogue) -> Stream:
        return Stream(self, dialogue)

    def exchange(self, dialogue: Dialogue) -> Generator[Chunk, None, None]:
        """Runs one dialogue to its end, and yields its chunks; cancels the request if the caller stops early."""
        while not dialogue.is_closed:
            try:
                yield from self.once(dialogue)
                return
            except self.moves_on as error:
                time.sleep(dialogue.retry(error))

    @abstractmethod
    def once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        """Runs the dialogue with one server, without retries; cancels the request if the caller stops early."""


class Stream(BaseStream):
    """A completion in progress: iterate once for its chunks, then read its `result`.

    A second iteration raises InvalidRequest. A context manager, which closes it on exit.
    """

    def __init__(self, client: BaseClient, dialogue: Dialogue) -> None:
        self._client = client
        self._dialogue = dialogue
        self._reading: Callable[[], Generator[Chunk, None, None] | None] = lambda: None

    def __iter__(self) -> Iterator[Chunk]:
        self._dialogue.begin()
        reading = self._client.exchange(self._dialogue)
        self._reading = weakref.ref(reading)  # weak: leaving the loop ends the generator, and so cancels the request
        return reading

    def close(self) -> None:
        """Cancels the request unless it is finished. A second call does nothing.

        A loop in another thread ends at the next chunk, or within a second without one.
        """
        self._dialogue.is_closed = True
        reading = self._reading()
        if reading is not None:
            with suppress(ValueError):  # another thread is in the generator, and checks `is_closed`
                reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Grown = Callable[[Chunk], object]


class AsyncBaseClient(StreamClient["AsyncStream"]):
    """A client whose calls are awaited. `async with` closes it on exit."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the unfinished streams, and refuses new ones. A second call does nothing."""
        for stream in self._end_streams():
            await stream.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[GenerateFields]
    ) -> GenerationResult:
        """See `Client.generate`."""
        stream = self.ask(self._request("generate", prompt, sampling, options))
        async for _ in stream:
            pass
        return stream.result

    def _stream_of(self, dialogue: Dialogue) -> AsyncStream:
        return AsyncStream(self, dialogue)

    async def exchange(self, dialogue: Dialogue) -> AsyncGenerator[Chunk, None]:
        """Runs one dialogue to its end, and yields its chunks; cancels the request if the caller stops early."""
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

    async def follow(self, dialogue: Dialogue, grown: Grown) -> None:
        """Runs one dialogue to its end; calls `grown` with each chunk in the event loop's turn that receives it."""
        while True:
            try:
                await self.once(dialogue, grown)
                return
            except self.moves_on as error:
                await asyncio.sleep(dialogue.retry(error))

    @abstractmethod
    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        """Runs the dialogue with one server, without retries; cancels the request if the caller stops early."""

    @abstractmethod
    async def end(self, dialogue: Dialogue) -> None:
        """Asks the server to end a dialogue in progress."""


class AsyncStream(BaseStream):
    """A completion in progress: iterate once with `async for`, then read its `result`; or `follow` it.

    A second iteration raises InvalidRequest. `async with` closes it on exit.
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
        """Cancels the request unless it is finished, which ends a loop in another task. A second call does nothing."""
        if self._dialogue.is_closed:
            return
        self._dialogue.is_closed = True
        reading = self._reading()
        if reading is None or cast("AsyncGeneratorType[Chunk, None]", reading).ag_running:
            await self.end()  # another task reads, or `follow` does; the server's answer ends it
        else:
            await reading.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def follow(self, grown: Grown) -> GenerationResult:
        """Reads the stream to its end; calls `grown`, which must be quick, with each chunk as soon as it arrives."""
        self._dialogue.begin()
        await self._client.follow(self._dialogue, grown)
        return self.result

    @property
    def request(self) -> str:
        """The request id, as in the logs of client and server."""
        return self._dialogue.request

    async def end(self) -> None:
        """Asks the server to end the text; the loop continues until the end arrives, with finish_reason cancelled."""
        await self._client.end(self._dialogue)
