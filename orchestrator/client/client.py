"""The Python clients: connect to a running server over ZeroMQ, blocking or awaited, and resume on another server.

`Client`: thread-safe. `AsyncClient`: the same calls for asyncio. `Connecting`: what both share: endpoint, keys and
timeout.

`AsyncSocket`: a ZeroMQ socket in asyncio that handles each message in the event loop's turn that receives it.
`zmq.asyncio` costs several futures and polls for each message, and a task that awaits each message costs another turn.

`Patience`: how long a client waits for a silent server; uses no socket.

`Resumed`: several servers; when one goes away, the next continues the text at the next token. The text stays the same,
because its noise is a function of seed and position, and the next server gets the first one's seed; a server with
another model or number format refuses to continue.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    WorkerError,
)
from outrider.protocol.keys import ClientKeys
from outrider.protocol.messages import Message, Stats, StatsQuery

ASK_AFTER_SECONDS = 1.0


class Patience:
    """Distinguishes a busy server from a lost one: queries it after a silence, and gives up `seconds` later.

    Raises:
        EndpointError: no server is at the endpoint.
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
        """How long to wait for a message before `on_silence` is called."""
        return max(int(1000 * min(ASK_AFTER_SECONDS, self._seconds / 2)), 1)

    def on_message(self) -> None:
        """Resets the count of unanswered queries."""
        self._asked = 0

    def on_silence(self, about: str | None = None) -> StatsQuery:
        """Returns the query to send after `poll_ms` without a message; `about`: a request that the server should know.

        Raises:
            EndpointError: no server is at the endpoint any more, or the queries were not answered for too long.
            KeyFault: the server refuses this side's key.
            OutriderError: raised by `alive`, since the server has ended.
        """
        self._look()
        if self._asked == 1 and self._endpoint.startswith("tcp:"):
            with suppress(EndpointError):  # the server may only be suspended; unanswered queries are counted below
                probe(self._endpoint, self._keys)
        self._asked += 1  # counted, not timed: while this process is suspended it asks nothing and misses no answer
        if (self._asked - 1) * self.poll_ms > 1000 * self._seconds:
            raise EndpointError(
                f"nothing answers at {self._endpoint} for {self._seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}", about)

    def _look(self) -> None:
        if self._alive is not None:
            self._alive()
        require_server(self._endpoint)


POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As plain numbers: arithmetic on Python's flags takes longer than the poll."""

Handler = Callable[[Message], bool]
"""Handles a message; returns whether it is the last."""


class AsyncSocket:
    """Owns a connected `socket` until `close`."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Handler) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._fault: Exception | None = None
        self._is_silent = True
        self._file = socket.FD
        self._polled = [(socket, POLLIN)]
        self._loop.add_reader(self._file, self._take_in)

    def send(self, message: Message) -> None:
        """Sends without waiting: ZeroMQ's queue has room for a client's few messages, unless the server refuses it."""
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        self._take_in()  # sending also resets the file descriptor's signal for messages that have arrived

    async def until_over(self, patience: Patience, about: str | None = None) -> None:
        """Returns when the last message has been handled; queries a silent server `about` a request.

        Raises:
            OutriderError: `patience` is over, a message is invalid, or its handler raised this.
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
        """Closes the socket; messages that are still queued have `linger_ms` milliseconds to leave."""
        self._loop.remove_reader(self._file)
        self._over.cancel()
        self._socket.close(linger_ms)

    def _take_in(self) -> None:
        """Receives frame by frame: headers say where messages end; asking ZeroMQ costs half as much as receiving."""
        frames: list[bytes] = []
        while zmq.zmq_poll(self._polled, 0):
            frames.append(self._socket.recv(NOBLOCK))
        if frames:
            self._is_silent = False
            if not self._over.done():
                self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        is_last = True
        try:
            is_last = any(map(self._handle, decode_all(frames)))
        except OutriderError as error:
            self._fault = error  # `until_over` raises it
        except Exception as error:
            self._fault = error
            raise
        finally:
            if is_last:
                self._over.set_result(None)


FLUSH_MS = 1000


class Connecting:
    """A client of the server at `endpoint`; see `Client`.

    Each call has its own socket, so calls don't wait for each other here; the server queues them fairly by client.
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
        """Returns the patience of one call. Raises EndpointError if no server is at the endpoint."""
        return Patience(self.endpoint, self.timeout, self._alive, self._keys)

    def connected(self) -> zmq.Socket[bytes]:
        """Returns a new connected socket.

        Raises:
            ServerBusy: this process has as many sockets as it can have.
            EndpointError: the endpoint can't be connected to.
        """
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # each request has a socket, and a process can have only so many
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

    `timeout`: seconds that a queried server may be silent; the length of a text does not matter. `alive`: raises if the
    server is known to have ended. `reconnect`: if the server goes away, continue each text on the next server at this
    endpoint, which has two minutes to start. Timings are then of the last server.

    Endpoints on other machines need the keys of both sides (docs/security.md). `server_key`: the key that the server
    prints; None: the one saved by `outrider keys trust`. `keys`: the folder of your keys; None: `outrider keys`' own.

    Raises:
        KeyFault: the endpoint needs keys, and one is missing or can't be used; on use, if the server refuses the key.
        EndpointError: the endpoint is malformed; on use, if nothing answers there.
    """

    def stats(self) -> Stats:
        """Returns the server's workers and totals."""
        patience = self.patience()
        with self.connected() as socket:
            query = patience.on_silence()
            socket.send_multipart(encode(query))
            while True:
                answer = self._receive(socket, patience)
                if isinstance(answer, Stats):
                    return answer

    def once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        patience = self.patience()
        farewell = encode(dialogue.cancel_message)  # encoded now: a program that exits may have unloaded the codec
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
        """Returns the next message, or None after a silence, in which case a query was sent."""
        if not socket.poll(patience.poll_ms):
            query = encode(patience.on_silence(about))
            with suppress(zmq.Again):  # ZeroMQ's queue is full if the server accepts no connection
                socket.send_multipart(query, flags=zmq.NOBLOCK)
            return None
        patience.on_message()
        return decode(socket.recv_multipart())


class AsyncClient(Connecting, AsyncBaseClient):
    """A client of the server at `endpoint`; see `Client` for the calls' arguments, results and errors."""

    @cached_property
    def _open(self) -> dict[str, AsyncSocket]:
        """The sockets of the dialogues in progress, by request id."""
        return {}

    async def stats(self) -> Stats:
        """Returns the server's workers and totals."""
        answers: list[Stats] = []

        def handle(answer: Message) -> bool:
            answers.extend((answer,) if isinstance(answer, Stats) else ())
            return bool(answers)

        patience = self.patience()
        socket = AsyncSocket(self.connected(), handle)
        try:
            socket.send(patience.on_silence())
            await socket.until_over(patience)
        finally:
            socket.close()
        return answers[0]

    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        def handle(message: Message) -> bool:
            chunk = dialogue.take(message)
            if chunk is not None:
                grown(chunk)
            return dialogue.over

        patience = self.patience()
        socket = AsyncSocket(self.connected(), handle)
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
        """Asks the server to end a dialogue in progress."""
        socket = self._open.get(dialogue.request)
        if socket is not None:
            socket.send(dialogue.cancel_message)


MOVES_ON = (EndpointError, WorkerError, ServerBusy, OtherModel)
"""Errors after which the next of several servers is tried."""

C = TypeVar("C", Client, AsyncClient)


class _Sources(Generic[C]):
    """Servers in turn; the one that answered last is tried first."""

    def __init__(self, clients: Sequence[C]) -> None:
        if not clients:
            raise InvalidRequest("Resumed needs at least one client")
        self.all: list[C] = list(clients)
        self._at = 0

    @contextmanager
    def one(self) -> Iterator[C]:
        """Yields a server; if it is lost, the next one is first, unless another request has already moved on."""
        at = self._at
        try:
            yield self.all[at % len(self.all)]
        except MOVES_ON:
            self._at += self._at == at
            raise


class Resumed(BaseClient):
    """Sends requests to the first of `clients`; a text that it can't finish continues on the next, and so on in turn.

    Create the clients with a `timeout` of about a second, so that a lost server is noticed soon. If no server can
    continue, the last server's error is raised.
    """

    moves_on = MOVES_ON

    def __init__(self, clients: Sequence[Client]) -> None:
        super().__init__()
        self._sources: _Sources[Client] = _Sources(clients)
        self.sources = len(clients)

    def __repr__(self) -> str:
        return f"Resumed({self._sources.all!r})"

    def once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        with self._sources.one() as client:
            yield from client.once(dialogue)


class AsyncResumed(AsyncBaseClient):
    """`Resumed` for asyncio."""

    moves_on = MOVES_ON

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        super().__init__()
        self._sources: _Sources[AsyncClient] = _Sources(clients)
        self.sources = len(clients)

    def __repr__(self) -> str:
        return f"AsyncResumed({self._sources.all!r})"

    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        with self._sources.one() as client:
            await client.once(dialogue, grown)

    async def end(self, dialogue: Dialogue) -> None:
        for client in self._sources.all:
            await client.end(dialogue)
