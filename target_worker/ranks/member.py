"""Another rank's end of the line: what it hears of rank 0, and what it says to it."""

from __future__ import annotations

import json
import logging
import socket

import zmq

from outrider.engine.ranks import Ranks
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import OutriderError, WorkerError
from outrider.protocol.messages import Fault, Message, RankHello, Shutdown, Welcome
from outrider.target_worker.ranks.line import FAREWELL_MS, Line, name_of

log = logging.getLogger(__name__)


class Member(Line):
    """Another rank's end."""

    def __init__(self, ranks: Ranks) -> None:
        """Waits until all ranks have come so far."""
        super().__init__(zmq.DEALER, ranks)
        address, port, door, key, secret = json.loads(ranks.told(b""))
        self._socket.setsockopt(zmq.IDENTITY, name_of(ranks.rank))
        self._socket.curve_serverkey = key.encode()
        self._socket.connect(f"tcp://{address}:{port}")
        try:
            lifeline = socket.create_connection((address, door))
            lifeline.sendall(bytes.fromhex(secret))
        except OSError as error:
            raise WorkerError(f"rank 0 can't be reached at {address} ({error}); expected hosts that reach it") from None
        self._watch(lifeline)

    def enter(self, own: RankHello) -> None:
        """Returns when all ranks may load; where rank 0 finds that they don't go together this process ends."""
        self.say(own)
        if not isinstance(self.hear()[0], Welcome):
            raise SystemExit(0)

    def say(self, message: Message) -> None:
        self._socket.send_multipart(encode_all([message]))

    def hear(self) -> list[Message]:
        """What rank 0 tells next; waits."""
        return decode_all(self._socket.recv_multipart())

    def close(self) -> None:
        """Ends as rank 0 has told."""
        self.end()
        if not self._socket.closed:
            self.say(Shutdown())
        super().close()

    def failed(self, error: OutriderError) -> int:
        """Rank 0 hears why this one can't go on, and has a while to tell; the code to exit with."""
        log.error("%s", error)
        self.end()
        self.say(Fault(name_of(self.ranks.rank).decode(), None, str(error)))
        self._socket.poll(FAREWELL_MS)
        self.close()
        return error.exit_code
