"""Fuzzes the clients' endpoint on TCP below ZeroMQ: broken greetings, commands and frames.

The server is that of `clients_socket`, with an honest client.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from outrider.protocol.codec import encode
from outrider.protocol.endpoints import Tcp, parse_endpoint
from outrider.protocol.messages import Generate
from outrider.protocol.sampling import SamplingParams
from tests.harness.fuzz.clients_socket import ClientsSocketFuzz

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
FLAGS = (0, 1, 2, 3, 4, 6, 7, 0x80, 0xFF)
LENGTHS = (0, 1, 255, 2**16, 2**29 - 1, 2**29, 2**29 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SECONDS = 5.0
MOST_FRAMES = 24


class WireFuzz(ClientsSocketFuzz):
    """Each `fire` sends a frame on a connection that carries several."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, "tcp://127.0.0.1:0")
        where = parse_endpoint(self.clients.endpoint)
        self._port = where.port if isinstance(where, Tcp) else 0
        self._line: socket.socket | None = None
        self._left = self._connections = 0
        self._words = bytes(encode(Generate("q", "x", None, SamplingParams(max_tokens=2)))[0])

    def send_broken(self) -> None:
        if self._line is None or self._left < 1:
            self._hang_up()
            self._connect()
        self._left -= 1
        try:
            if self._line is not None:
                self._line.sendall(self._frame())
        except OSError:  # the server may close the connection
            self._left = 0

    def summary(self) -> str:
        return f"{self._connections} connections; {super().summary()}"

    def close(self) -> None:
        self._hang_up()
        super().close()

    def _connect(self) -> None:
        self._connections += 1
        self._line = socket.create_connection(("127.0.0.1", self._port), SECONDS)
        self._left = self._rng.randint(1, MOST_FRAMES)
        with suppress(OSError):
            match self._rng.randrange(4):
                case 0:
                    self._line.sendall(self._rng.randbytes(self._rng.randrange(100)))
                case 1:
                    self._line.sendall(self._broken(GREETING + READY))
                case _:
                    self._line.sendall(GREETING + READY)

    def _hang_up(self) -> None:
        if self._line is not None:
            if self._rng.random() < 0.5:  # with a reset
                self._line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01" + bytes(7))
            self._line.close()
        self._line = None

    def _frame(self) -> bytes:
        rng = self._rng
        body = rng.choice((self._words, b"", rng.randbytes(rng.randrange(300)), self._broken(self._words)))
        flags, length = rng.choice(FLAGS), rng.choice((len(body), len(body), rng.choice(LENGTHS)))
        if flags & 2:
            return bytes((flags,)) + length.to_bytes(8, "big") + body
        return bytes((flags, length & 0xFF)) + body

    def _broken(self, data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(self._rng.randint(1, 3)):
            found[self._rng.randrange(len(found))] = self._rng.randrange(256)
        return bytes(found[: self._rng.choice((len(found), self._rng.randrange(len(found))))])
