"""The asyncio Python client, with the same calls as `client`."""

from __future__ import annotations

import asyncio
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import AsyncGeneratorType
from typing import Self, Unpack, cast

import zmq

from outrider.orchestrator.client.client import (
    FLUSH_MS,
    RETRYABLE_ERRORS,
    BaseStream,
    ClientSelector,
    EndpointClient,
    Liveness,
    StreamClient,
)
from outrider.orchestrator.client.dialogue import (
    Chunk,
    Dialogue,
    GenerateFields,
    GenerationResult,
    Prompt,
    generate_message,
)
from outrider.protocol.codec import decode_all, encode
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Cancel, Message, Stats
from outrider.protocol.sampling import SamplingParams

POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
"""Plain integers, because arithmetic on Python's `Flag` takes longer than the poll."""

Handler = Callable[[Message], bool]
"""Handles a message; returns whether it is the last."""

ChunkHandler = Callable[[Chunk], object]


class AsyncSocket:
    """Owns a connected `socket` until `close`; handles each message in the iteration of the event loop that reads it.

    `zmq.asyncio` costs several futures and polls a message; a task that awaits each message costs another iteration.
    """

    def __init__(self, socket: zmq.Socket[bytes], handle: Handler) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._finished.add_done_callback(asyncio.Future.exception)  # asyncio would log an error that no task awaits
        self._is_silent = True
        self._file = socket.FD
        self._poll_list = [(socket, POLLIN)]
        self._loop.add_reader(self._file, self._receive_waiting)

    def send(self, message: Message) -> None:
        """Sends without waiting: ZeroMQ's queue has room for a client's few messages, unless the server refuses it."""
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._receive_waiting()  # sending also resets the file descriptor's signal for messages that have arrived

    async def wait_until_done(self, liveness: Liveness, about: str | None = None) -> None:
        """Waits until the last message has been handled; queries a silent server `about` a request.

        Raises:
            OutriderError: the server is silent for too long, a message is invalid, or its handler raised this.
        """
        while not self._finished.done():
            self._is_silent = True
            await asyncio.wait((self._finished,), timeout=liveness.poll_ms / 1000)
            if not self._is_silent:
                liveness.on_message()
            elif not self._finished.done():
                self.send(await asyncio.to_thread(liveness.on_silence, about))
        self._finished.result()

    def finish(self) -> None:
        """Ends the wait for the last message."""
        if not self._finished.done():
            self._finished.set_result(None)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket; messages that are still queued have `linger_ms` milliseconds to leave."""
        self._loop.remove_reader(self._file)
        self._socket.close(linger_ms)

    def _receive_waiting(self) -> None:
        """Receives all waiting frames; headers say where messages end: asking ZeroMQ costs half of a receive."""
        frames: list[bytes] = []
        while zmq.zmq_poll(self._poll_list, 0):
            frames.append(self._socket.recv(NOBLOCK))
        if not frames or self._finished.done():
            return
        self._is_silent = False
        try:
            if any(map(self._handle, decode_all(frames))):
                self._finished.set_result(None)
        except OutriderError as error:
            self._finished.set_exception(error)  # `wait_until_done` raises it
        except Exception as error:
            self._finished.set_exception(error)
            raise


class AsyncBaseClient(StreamClient["AsyncStream"]):
    """A client whose calls are awaited. `async with` closes it on exit."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the unfinished streams, and refuses new ones. A second call does nothing."""
        for stream in self._refuse_streams():
            await stream.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[GenerateFields]
    ) -> GenerationResult:
        """See `Client.generate`."""
        stream = self.ask(generate_message(f"{type(self).__name__}.generate", prompt, sampling, False, options))
        async for _ in stream:
            pass
        return stream.result

    def _create_stream(self, dialogue: Dialogue) -> AsyncStream:
        return AsyncStream(self, dialogue)

    async def run_dialogue(self, dialogue: Dialogue) -> AsyncGenerator[Chunk, None]:
        """Runs one dialogue to its end, and yields its chunks; cancels the request if the caller stops early."""
        chunks = asyncio.Queue[Chunk | None]()
        reader_task = asyncio.create_task(self.follow(dialogue, chunks.put_nowait))
        reader_task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            reader_task.result()
        finally:
            reader_task.cancel()
            await asyncio.wait((reader_task,))

    async def follow(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        """Runs one dialogue to its end; calls `on_chunk` with each chunk in the loop iteration that receives it."""
        while not dialogue.is_closed:
            try:
                await self.run_once(dialogue, on_chunk)
                return
            except RETRYABLE_ERRORS as error:
                await asyncio.sleep(dialogue.retry(error))

    @abstractmethod
    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        """Runs the dialogue with one server, without retries; cancels the request if the caller stops early."""


class AsyncStream(BaseStream[AsyncBaseClient, AsyncGenerator[Chunk, None]], AbstractAsyncContextManager["AsyncStream"]):
    """A completion in progress: iterate over it with `async for`, then read its `result`; or `follow` it.

    A second iteration raises InvalidRequest. `async with` closes it on exit.
    """

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._dialogue.begin()
        reading = self._client.run_dialogue(self._dialogue)
        self._reading = weakref.ref(reading)
        return reading

    async def close(self) -> None:
        """Cancels the request unless it is finished, which ends a loop in another task. A second call does nothing."""
        if self._dialogue.is_closed:
            return
        self._dialogue.is_closed = True
        reading = self._reading()
        if reading is None or cast("AsyncGeneratorType[Chunk, None]", reading).ag_running:
            self._dialogue.cancel()  # another task reads, or `follow` does
        else:
            await reading.aclose()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def follow(self, on_chunk: ChunkHandler) -> GenerationResult:
        """Reads the stream to its end; calls `on_chunk`, which must be quick, with each chunk as soon as it arrives."""
        self._dialogue.begin()
        await self._client.follow(self._dialogue, on_chunk)
        return self.result

    @property
    def request(self) -> str:
        """The request id, as in the logs of client and server."""
        return self._dialogue.request

    async def end(self) -> None:
        """Asks the server to end the text; the loop continues until the end arrives, with finish_reason cancelled."""
        self._dialogue.is_ending = True
        self._dialogue.cancel()


class AsyncClient(EndpointClient, AsyncBaseClient):
    """A client of the server at `endpoint`; see `Client` for the calls' arguments, results and errors."""

    async def stats(self) -> Stats:
        """Returns the server's workers and totals."""
        answers: list[Stats] = []

        def handle(answer: Message) -> bool:
            answers.extend((answer,) if isinstance(answer, Stats) else ())
            return bool(answers)

        liveness = self.liveness()
        socket = AsyncSocket(self.open_socket(), handle)
        try:
            socket.send(liveness.on_silence())
            await socket.wait_until_done(liveness)
        finally:
            socket.close()
        return answers[0]

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        def handle(message: Message) -> bool:
            if (chunk := dialogue.handle_message(message)) is not None:
                on_chunk(chunk)
            return dialogue.over

        liveness = self.liveness()
        socket = AsyncSocket(self.open_socket(), handle)
        try:
            socket.send(dialogue.first_message)
            dialogue.was_sent = True
            dialogue.cancel = lambda: socket.finish() if dialogue.is_closed else socket.send(Cancel(dialogue.request))
            if dialogue.is_ending:  # `end` was called while no server answered
                dialogue.cancel()
            await socket.wait_until_done(liveness, dialogue.request)
        finally:
            dialogue.cancel = lambda: None
            if not dialogue.over:
                socket.send(Cancel(dialogue.request))
            socket.close(FLUSH_MS)


class AsyncResumed(ClientSelector[AsyncClient], AsyncBaseClient):
    """`Resumed` for asyncio."""

    _client_type = AsyncClient

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        with self.current_client() as client:
            await client.run_once(dialogue, on_chunk)
