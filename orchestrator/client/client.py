"""The Python clients: ask a running server over ZeroMQ, blocking or awaited, and continue with another server.

`Client`: safe to share between threads. `AsyncClient`: the same calls for asyncio. `Connecting`: what both share: where
the server is, how it is reached, and how long it may be silent.

`AsyncSocket`: a ZeroMQ socket in asyncio: each message is handled as it comes, in the loop's own turn, until one is the
last. ZeroMQ's own sockets for asyncio (`zmq.asyncio`) cost some futures and polls for each message, and a task that
waits for each message costs another turn of the loop.

`Patience`: how long a client waits for a server that is silent. No socket in here.

`Resumed`: texts that outlive their server: where one goes away, the next continues at the token where it broke off. It
is the same text, because its noise is a function of seed and position; a server with another model or number format
refuses to continue it. Knows clients and dialogues; no socket.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Generic, Never, TypeVar

import zmq

from outrider.orchestrator.auth import client_key
from outrider.orchestrator.client.base_client import AsyncBaseClient, BaseClient, Grown
from outrider.orchestrator.client.dialogue import Chunk, Dialogue
from outrider.protocol import values
from outrider.protocol.codec import decode, decode_all, encode
from outrider.protocol.endpoints import connect, keys_to, probe, require_server
from outrider.protocol.errors import (
    EndpointError,
    InvalidRequest,
    OtherModel,
    OutriderError,
    ServerBusy,
    ServerStopped,
    WorkerError,
)
from outrider.protocol.keys import ClientKeys
from outrider.protocol.messages import Message, Stats, StatsQuery

ASK_AFTER_SECONDS = 1.0


class Patience:
    """Tells a server that is busy from one that is gone: asks after some silence, gives up `seconds` after that.

    Raises:
        EndpointError: nobody serves the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        seconds: float,
        alive: Callable[[], None] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._seconds = seconds
        self._alive = alive
        self.on_message()
        self._look()

    @property
    def poll_ms(self) -> int:
        """How long to wait for something to arrive before `on_silence` is called."""
        return max(int(1000 * min(ASK_AFTER_SECONDS, self._seconds / 2)), 1)

    def on_message(self) -> None:
        """Something arrived."""
        self._asked = 0

    def on_silence(self, about: str | None = None) -> StatsQuery:
        """Nothing arrived for `poll_ms`; what to ask, `about` a request that should be there.

        Raises:
            EndpointError: nobody serves the endpoint any more, or a question was not answered for too long.
            KeyFault: it is served, but not to this side's key.
            OutriderError: `alive` knows that the server ended.
        """
        self._look()
        if self._asked == 1 and self._endpoint.startswith("tcp:"):
            with suppress(EndpointError):  # it may only be stopped; what is left unanswered is counted below
                probe(self._endpoint, self._keys)
        self._asked += 1  # counted, not timed: who is stopped asks nothing, and nobody owes it an answer
        if (self._asked - 1) * self.poll_ms > 1000 * self._seconds:
            raise EndpointError(
                f"nothing answers at {self._endpoint} for {self._seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}", about)

    def _look(self) -> None:
        if self._alive is not None:
            self._alive()
        require_server(self._endpoint)


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
                patience.on_message()
            elif not self._over.done():
                self.send(await asyncio.to_thread(patience.on_silence, about))
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


FLUSH_MS = 1000


class Connecting:
    """A client of the server at `endpoint`; see `Client`.

    Each call has a socket of its own, so calls don't wait for each other here; the server queues them fairly by client.
    """

    def __init__(
        self,
        endpoint: str,
        timeout: float = 10.0,
        alive: Callable[[], None] | None = None,
        reconnect: bool = False,
        server_key: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            known = ("endpoint", "timeout", "alive", "reconnect", "server_key", "keys")
            raise values.unknown_keyword(type(self).__name__, unknown, known)
        super().__init__()
        self.endpoint = endpoint
        self.sources = int(values.flag("reconnect", reconnect))
        self.timeout = values.number("timeout", timeout, 0.001, math.inf)
        self._keys = keys_to(endpoint, server_key, keys)
        self._alive = alive
        self._key = client_key()
        self._serials = itertools.count()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r})"

    def patience(self) -> Patience:
        """Raises EndpointError: nobody serves the endpoint."""
        return Patience(self.endpoint, self.timeout, self._alive, self._keys)

    def connected(self) -> zmq.Socket[bytes]:
        """A socket of its own.

        Raises:
            ServerBusy: this process can have no more.
            EndpointError: there is no way to the endpoint.
        """
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # each request has one, and there are so many to a process
            raise ServerBusy(
                f"this process has too many requests in flight ({error}); wait for some to finish"
            ) from None
        socket.setsockopt(zmq.ROUTING_ID, self._key + next(self._serials).to_bytes(4, "big"))
        socket.setsockopt(zmq.LINGER, 0)
        try:
            connect(socket, self.endpoint, self._keys)
        except EndpointError:
            socket.close()
            raise
        return socket


class Client(Connecting, BaseClient):
    """A client of the server at `endpoint` (`outrider serve` prints it).

    `timeout`: seconds for which a server that is asked whether it is there may keep silent; how long a text takes does
    not count. `alive`: raises when it is known that the server has ended. `reconnect`: a text whose server goes away
    goes on where it was with the next one at this endpoint, which may take two minutes to come. Timings are that one's.

    Beyond this machine both sides have keys (docs/security.md). `server_key`: the server's, which it prints; None: as
    `outrider keys trust` was told. `keys`: the folder of one's own; None: that of `outrider keys`.

    Raises:
        KeyFault: the endpoint needs keys, and one is missing or can't be used; on use, when the server refuses it.
        EndpointError: it is no endpoint; on use, when nothing answers there.
    """

    def stats(self) -> Stats:
        """The server's workers and totals."""
        patience = self.patience()
        with self.connected() as socket:
            query = patience.on_silence()
            socket.send_multipart(encode(query))
            while True:
                answer = self._receive(socket, patience)
                if isinstance(answer, Stats):
                    return answer

    def exchange(self, dialogue: Dialogue) -> Generator[Chunk, None, None]:
        while not dialogue.is_closed:
            try:
                yield from self.once(dialogue)
                return
            except (EndpointError, ServerStopped) as error:
                time.sleep(dialogue.retry(error))

    def once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        """What one server says, to its end or the dialogue's; cancels it when the caller leaves early."""
        patience = self.patience()
        farewell = encode(dialogue.cancel_message)  # now: a program that ends may have taken its modules down by then
        socket = self.connected()
        try:
            socket.send_multipart(encode(dialogue.opening))
            dialogue.was_sent = True
            while not (dialogue.over or dialogue.is_closed):
                answer = self._receive(socket, patience, dialogue.request)
                chunk = None if answer is None else dialogue.take(answer)
                if chunk is not None:
                    yield chunk
        finally:
            if not dialogue.over:
                with suppress(zmq.Again):
                    socket.send_multipart(farewell, flags=zmq.NOBLOCK)
            socket.close(linger=FLUSH_MS)

    def _receive(self, socket: zmq.Socket[bytes], patience: Patience, about: str | None = None) -> Message | None:
        """The next message; None: none came for a while, and the server was asked whether it is there."""
        if not socket.poll(patience.poll_ms):
            query = encode(patience.on_silence(about))
            with suppress(zmq.Again):  # to a server that lets nobody in ZeroMQ takes nothing more
                socket.send_multipart(query, flags=zmq.NOBLOCK)
            return None
        patience.on_message()
        return decode(socket.recv_multipart())


class AsyncClient(Connecting, AsyncBaseClient):
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
            socket.send(patience.on_silence())
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
                socket.send(dialogue.cancel_message)
            socket.close(FLUSH_MS)

    async def end(self, dialogue: Dialogue) -> None:
        """Asks the server to end a dialogue that is going on."""
        socket = self._open.get(dialogue.request)
        if socket is not None:
            socket.send(dialogue.cancel_message)


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


class Resumed(BaseClient):
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


class AsyncMoving(AsyncBaseClient):
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
