"""The Python client: asks a running server over ZeroMQ and hands out text. Safe to share between threads.

Each call has a socket of its own, so calls don't wait for each other here; the server queues them fairly by client.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import zmq

from outrider.orchestrator.client.asker import Asker
from outrider.orchestrator.client.dialogue import Dialogue, Patience, check_timeout, keys_to
from outrider.orchestrator.client.result import Chunk
from outrider.orchestrator.client_key import client_key
from outrider.protocol import values
from outrider.protocol.codec import decode, encode
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ServerStopped
from outrider.protocol.messages import Message, Stats

FLUSH_MS = 1000


class Client(Asker):
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
        self.sources = int(values.flag("reconnect", reconnect))
        self.timeout = check_timeout(timeout)
        self._alive = alive
        self._key = client_key()
        self._serials = itertools.count()

    def stats(self) -> Stats:
        """The server's workers and totals."""
        patience = Patience(self.endpoint, self.timeout, self._alive, self._keys)
        with self._socket() as socket:
            query = patience.silent()
            socket.send_multipart(encode(query))
            while True:
                answer = self._receive(socket, patience)
                if isinstance(answer, Stats):
                    return answer

    def exchange(self, dialogue: Dialogue) -> Iterator[Chunk]:
        while True:
            try:
                yield from self.once(dialogue)
                return
            except (EndpointError, ServerStopped) as error:
                time.sleep(dialogue.retry(error))

    def once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        """What one server says, to its end or the dialogue's; cancels it when the caller leaves early."""
        patience = Patience(self.endpoint, self.timeout, self._alive, self._keys)
        socket = self._socket()
        try:
            socket.send_multipart(encode(dialogue.opening))
            dialogue.was_sent = True
            while not dialogue.over:
                chunk = dialogue.take(self._receive(socket, patience, dialogue.request))
                if chunk is not None:
                    yield chunk
        finally:
            if not dialogue.over:
                with suppress(zmq.Again):
                    socket.send_multipart(encode(dialogue.farewell), flags=zmq.NOBLOCK)
            socket.close(linger=FLUSH_MS)

    def _receive(self, socket: zmq.Socket[bytes], patience: Patience, about: str | None = None) -> Message:
        while not socket.poll(patience.poll_ms):
            query = encode(patience.silent(about))
            with suppress(zmq.Again):  # to a server that lets nobody in ZeroMQ takes nothing more
                socket.send_multipart(query, flags=zmq.NOBLOCK)
        patience.heard()
        return decode(socket.recv_multipart())

    def _socket(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._key + next(self._serials).to_bytes(4, "big"))
        socket.setsockopt(zmq.LINGER, 0)
        try:
            connect(socket, self.endpoint, self._keys)
        except EndpointError:
            socket.close()
            raise
        return socket
