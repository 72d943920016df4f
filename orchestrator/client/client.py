"""The Python client: asks a running server over ZeroMQ and hands out text. Safe to share between threads."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress

import zmq

from outrider.orchestrator.client.asker import Asker
from outrider.orchestrator.client.connecting import FLUSH_MS, Connecting
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.client.patience import Patience
from outrider.orchestrator.client.result import Chunk
from outrider.protocol.codec import decode, encode
from outrider.protocol.errors import EndpointError, ServerStopped
from outrider.protocol.messages import Message, Stats


class Client(Connecting, Asker):
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
            query = patience.silent()
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
        farewell = encode(dialogue.farewell)  # now: a program that ends may have taken its modules down by then
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
            query = encode(patience.silent(about))
            with suppress(zmq.Again):  # to a server that lets nobody in ZeroMQ takes nothing more
                socket.send_multipart(query, flags=zmq.NOBLOCK)
            return None
        patience.heard()
        return decode(socket.recv_multipart())
