"""The Python client for asyncio: the same calls as `Client`, awaited."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable

import zmq

from outrider.orchestrator.client.async_socket import AsyncSocket, Hear
from outrider.orchestrator.client.client import FLUSH_MS
from outrider.orchestrator.client.dialogue import Dialogue, Patience, Prompt, Wish, check_timeout, keys_to
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.client_key import client_key
from outrider.protocol import values
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ServerBusy, ServerStopped
from outrider.protocol.messages import Message, Stats
from outrider.protocol.sampling import SamplingParams

Grown = Callable[[Chunk], object]


class AsyncClient:
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
        self._reconnect = values.flag("reconnect", reconnect)
        self.timeout = check_timeout(timeout)
        self._alive = alive
        self._key = client_key()
        self._serials = itertools.count()
        self._open: dict[str, AsyncSocket] = {}

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        mode: str = "auto",
        num_draft_tokens: int | None = None,
        branches: int | None = None,
        chat_template: bool = True,
        origins: bool = False,
        drafter: str = "",
    ) -> GenerationResult:
        """The completion of `prompt`; see `Client.generate`."""
        sampling = sampling or SamplingParams()
        wish = Wish(prompt, sampling, mode, num_draft_tokens, branches, chat_template, origins, drafter=drafter)
        stream = AsyncStream(self, Dialogue(wish, None, self._reconnect))
        async for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        mode: str = "auto",
        num_draft_tokens: int | None = None,
        branches: int | None = None,
        chat_template: bool = True,
        origins: bool = False,
        rounds: bool = False,
        drafter: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncStream:
        """The completion of `prompt` as it grows; see `Client.stream`. Leaving the loop cancels."""
        sampling = sampling or SamplingParams()
        wish = Wish(prompt, sampling, mode, num_draft_tokens, branches, chat_template, origins, rounds, drafter=drafter)
        return AsyncStream(self, Dialogue(wish, progress, self._reconnect))

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

    async def follow(self, dialogue: Dialogue, grown: Grown) -> None:
        """The same, with `grown` hearing of each chunk in the very turn of the loop that brings it."""
        while True:
            try:
                await self._follow(dialogue, grown)
                return
            except (EndpointError, ServerStopped) as error:
                await asyncio.sleep(dialogue.retry(error))

    async def _follow(self, dialogue: Dialogue, grown: Grown) -> None:
        """The same with one server."""

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


class AsyncStream:
    """A completion that grows: iterate once with `async for`, then ask for the `result`; or `follow` it.

    A second loop, over a finished or a broken-off stream, is an InvalidRequest.
    """

    def __init__(self, client: AsyncClient, dialogue: Dialogue) -> None:
        self._client = client
        self._dialogue = dialogue

    def __aiter__(self) -> AsyncIterator[Chunk]:
        self._dialogue.begin()
        return self._client.exchange(self._dialogue)

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

    @property
    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: the stream was not read to its end.
        """
        return self._dialogue.result()
