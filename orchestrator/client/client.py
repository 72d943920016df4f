"""The blocking Python client: connects to a running server over ZeroMQ, and resumes texts on another server.

The blocking and the awaited clients (`async_client`) share `StreamClient`, `BaseStream` and `EndpointClient`: streams,
their results, and the endpoint, keys and timeout. Clients are thread-safe.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Never, Self, TypeVar, Unpack

import zmq

from outrider.orchestrator.auth import new_client_id
from outrider.orchestrator.client.dialogue import (
    Chunk,
    Dialogue,
    GenerateFields,
    GenerationResult,
    Prompt,
    generate_message,
)
from outrider.protocol import values
from outrider.protocol.codec import decode, encode
from outrider.protocol.endpoints import connect, find_client_keys, probe, require_server
from outrider.protocol.errors import (
    EndpointError,
    InvalidRequest,
    OtherModel,
    ServerBusy,
    WorkerError,
)
from outrider.protocol.keys import ClientKeys
from outrider.protocol.messages import Cancel, Generate, Message, Stats, StatsQuery
from outrider.protocol.sampling import SamplingParams

ASK_AFTER_SECONDS = 1.0
FLUSH_MS = 1000
RETRYABLE_ERRORS = (EndpointError, WorkerError, ServerBusy, OtherModel)
"""Errors after which a text may continue on another server; `Dialogue.retry` decides."""

S = TypeVar("S")
C = TypeVar("C")
R = TypeVar("R")


@dataclass
class Liveness:
    """Distinguishes a busy server from a lost one: queries a silent server, and gives up after `seconds`. Uses no
    socket of its own.

    Raises:
        EndpointError: no server is at the endpoint.
    """

    endpoint: str
    seconds: float
    alive: Callable[[], None] | None = None
    keys: ClientKeys | None = None

    def __post_init__(self) -> None:
        self.on_message()
        self._check_server()

    @property
    def poll_ms(self) -> int:
        """How long to wait for a message before `on_silence` is called."""
        return max(int(1000 * min(ASK_AFTER_SECONDS, self.seconds / 2)), 1)

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
        self._check_server()
        if self._asked == 1 and (self.alive is None or self.endpoint.startswith("tcp:")):
            with suppress(EndpointError):  # the server may only be suspended; unanswered queries are counted below
                probe(self.endpoint, self.keys)
        self._asked += 1  # counted, not timed: a suspended process sends no queries, and misses no answers
        if (self._asked - 1) * self.poll_ms > 1000 * self.seconds:
            raise EndpointError(
                f"no answer from {self.endpoint} within {self.seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}", about)

    def _check_server(self) -> None:
        if self.alive is not None:
            self.alive()
        require_server(self.endpoint)


class StreamClient(ABC, Generic[S]):
    """The base of blocking and awaited clients: creates streams, and closes them when it is closed.

    `sources`: the number of servers that may continue a text; see `Dialogue`. Thread-safe.
    """

    sources: int

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[S] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_closed = False

    def __getstate__(self) -> dict[str, object]:
        """Returns what a copy in another process needs: not the streams, nor the check of a child of this process."""
        return {name: value for name, value in vars(self).items() if name not in ("_streams", "_lock", "_alive")}

    def __setstate__(self, state: dict[str, object]) -> None:
        StreamClient.__init__(self)
        vars(self).update(state, _alive=None)

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
        return self.ask(generate_message(f"{type(self).__name__}.stream", prompt, sampling, rounds, options), progress)

    def ask(self, request: Generate, progress: Callable[[int, int], None] | None = None) -> S:
        """Streams the completion of a checked request.

        Raises:
            InvalidRequest: the client is closed.
        """
        stream = self._create_stream(Dialogue(request, progress, self.sources))
        with self._lock:
            if self._is_closed:
                raise InvalidRequest(f"this {type(self).__name__} is closed; create a new one")
            self._streams.add(stream)
        return stream

    def _refuse_streams(self) -> list[S]:
        """Refuses new streams from now on, and returns the streams that have to be closed."""
        with self._lock:
            self._is_closed = True
            return list(self._streams)

    @abstractmethod
    def _create_stream(self, dialogue: Dialogue) -> S: ...


class BaseStream(Generic[C, R]):
    """The state and result of a stream. `C` is the type of its client, `R` the type of the generator that reads it."""

    def __init__(self, client: C, dialogue: Dialogue) -> None:
        self._client = client
        self._dialogue = dialogue
        self._reading: Callable[[], R | None] = lambda: None

    @property
    def result(self) -> GenerationResult:
        """The finished completion. Raises InvalidRequest if the stream was not read to its end."""
        return self._dialogue.result()


class BaseClient(StreamClient["Stream"]):
    """A client whose calls block. A context manager, which closes it on exit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the unfinished streams of all threads, and refuses new ones. A second call does nothing."""
        for stream in self._refuse_streams():
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
        stream = self.ask(generate_message(f"{type(self).__name__}.generate", prompt, sampling, False, options))
        for _ in stream:
            pass
        return stream.result

    def _create_stream(self, dialogue: Dialogue) -> Stream:
        return Stream(self, dialogue)

    def run_dialogue(self, dialogue: Dialogue) -> Generator[Chunk, None, None]:
        """Runs one dialogue to its end, and yields its chunks; cancels the request if the caller stops early."""
        while not dialogue.is_closed:
            try:
                yield from self.run_once(dialogue)
                return
            except RETRYABLE_ERRORS as error:
                time.sleep(dialogue.retry(error))

    @abstractmethod
    def run_once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        """Runs the dialogue with one server, without retries; cancels the request if the caller stops early."""


class Stream(BaseStream[BaseClient, Generator[Chunk, None, None]], AbstractContextManager["Stream"]):
    """A completion in progress: iterate over its chunks, then read its `result`.

    A second iteration raises InvalidRequest. A context manager, which closes it on exit.
    """

    def __iter__(self) -> Iterator[Chunk]:
        self._dialogue.begin()
        reading = self._client.run_dialogue(self._dialogue)
        self._reading = weakref.ref(reading)  # weak: leaving the loop ends the generator, and so cancels the request
        return reading

    def close(self) -> None:
        """Cancels the request unless it is finished. A second call does nothing.

        A loop in another thread ends at the next chunk, or within a second without one.
        """
        self._dialogue.is_closed = True
        if (reading := self._reading()) is not None:
            with suppress(ValueError):  # another thread is in the generator, and checks `is_closed`
                reading.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


class EndpointClient:
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
            raise values.unknown_keyword_error(type(self).__name__, unknown, known)
        super().__init__()
        self.endpoint = endpoint
        self.sources = int(values.check_bool("reconnect", reconnect))
        self.timeout = values.check_float("timeout", timeout, 0.001, math.inf)
        given_key = None if server_key is None else values.check_text("server_key", server_key)
        folder = None if keys is None else values.check_path("keys", keys)
        self._keys = find_client_keys(endpoint, given_key, folder)
        self._alive = alive
        self._client_id = new_client_id()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r})"

    def liveness(self) -> Liveness:
        """Returns the liveness check of one call. Raises EndpointError if no server is at the endpoint."""
        return Liveness(self.endpoint, self.timeout, self._alive, self._keys)

    def open_socket(self) -> zmq.Socket[bytes]:
        """Returns a new connected socket.

        Raises:
            ServerBusy: this process has as many sockets as it can have.
        """
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # each request has a socket, and their number is limited
            raise ServerBusy(
                f"this process has too many requests in flight ({error}); wait for some to finish"
            ) from None
        socket.setsockopt(zmq.ROUTING_ID, self._client_id + os.urandom(8))  # no count: `fork` would copy it
        socket.setsockopt(zmq.LINGER, 0)
        connect(socket, self.endpoint, self._keys)
        return socket


class Client(EndpointClient, BaseClient):
    """A client of the server at `endpoint` (`outrider serve` prints it).

    `timeout`: seconds that a queried server may be silent; the length of a text does not matter. `alive`: raises if the
    server is known to have ended. `reconnect`: if the server goes away or fails, continue each text on the next server
    at this endpoint, which has two minutes to start. Timings are then the last server's.

    Endpoints on other machines need the keys of both sides (docs/security.md). `server_key`: the key that the server
    prints; None: the one saved by `outrider keys trust`. `keys`: the folder of your keys; None: the default folder.

    Raises:
        KeyFault: the endpoint needs keys, and one is missing or can't be used; on use, if the server refuses the key.
        EndpointError: the endpoint is malformed; on use, if nothing answers there.
    """

    def stats(self) -> Stats:
        """Returns the server's workers and totals."""
        liveness = self.liveness()
        with self.open_socket() as socket:
            _send(socket, encode(liveness.on_silence()))
            while not isinstance(answer := self._receive(socket, liveness), Stats):
                pass
            return answer

    def run_once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        liveness = self.liveness()
        cancellation = encode(Cancel(dialogue.request))  # encoded now: a program that exits may have unloaded the codec
        socket = self.open_socket()
        try:
            _send(socket, encode(dialogue.first_message))
            dialogue.was_sent = True
            while not (dialogue.over or dialogue.is_closed):
                answer = self._receive(socket, liveness, dialogue.request)
                chunk = None if answer is None else dialogue.handle_message(answer)
                if chunk is not None:
                    yield chunk
        finally:
            if not dialogue.over:
                _send(socket, cancellation)
            socket.close(linger=FLUSH_MS)

    def _receive(self, socket: zmq.Socket[bytes], liveness: Liveness, about: str | None = None) -> Message | None:
        """Returns the next message, or None after a silence, in which case a query was sent."""
        if not socket.poll(liveness.poll_ms):
            _send(socket, encode(liveness.on_silence(about)))
            return None
        liveness.on_message()
        return decode(socket.recv_multipart())


def _send(socket: zmq.Socket[bytes], frames: Sequence[bytes | memoryview]) -> None:
    """Sends without waiting: ZeroMQ takes nothing if the server has refused this side or accepts no connection."""
    with suppress(zmq.Again):
        socket.send_multipart(frames, flags=zmq.NOBLOCK)


class ClientSelector(Generic[C]):
    """Chooses the client of a server for `Resumed` and `AsyncResumed`, at first the one that answered last."""

    _client_type: type[C]

    def __init__(self, clients: Sequence[C]) -> None:
        kind, name = self._client_type, self._client_type.__name__
        if not (isinstance(clients, Sequence) and clients and all(isinstance(one, kind) for one in clients)):
            raise InvalidRequest(f"clients is {clients!r}; expected a list of clients, such as [{name}(A), {name}(B)]")
        super().__init__()
        self._clients: list[C] = list(clients)
        self._current = 0
        self.sources = len(clients)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._clients!r})"

    @contextmanager
    def current_client(self) -> Iterator[C]:
        """Yields the current client. If its server is lost, the next one becomes current, unless that has happened."""
        at = self._current
        try:
            yield self._clients[at % len(self._clients)]
        except RETRYABLE_ERRORS:
            self._current += self._current == at
            raise


class Resumed(ClientSelector[Client], BaseClient):
    """Sends requests to the first of `clients`; a text that it can't finish continues on the next, and so on in turn.

    The text stays the same, because its noise is a function of seed and position, and the next server gets the first
    one's seed; a server with another model or number format refuses to continue.

    Create the clients with a `timeout` of about a second, so that a lost server is noticed soon. If no server can
    continue, the last server's error is raised.
    """

    _client_type = Client

    def run_once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        with self.current_client() as client:
            yield from client.run_once(dialogue)
