"""Fuzzes the clients' endpoint on TCP below ZeroMQ: invalid greetings, commands and frames of ZMTP.

The server and the correct client are those of `clients_socket`.
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
    """Each `send_broken` sends a frame through a connection that is used for several frames."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, "tcp://127.0.0.1:0")
        endpoint = parse_endpoint(self.clients.endpoint)
        self._port = endpoint.port if isinstance(endpoint, Tcp) else 0
        self._connection: socket.socket | None = None
        self._frames_left = self._connections = 0
        self._valid_frame = bytes(encode(Generate("q", "x", None, SamplingParams(max_tokens=2)))[0])

    def send_broken(self) -> None:
        if self._connection is None or self._frames_left < 1:
            self._close_connection()
            self._connect()
        self._frames_left -= 1
        try:
            if self._connection is not None:
                self._connection.sendall(self._frame())
        except OSError:  # the server may close the connection
            self._frames_left = 0

    def summary(self) -> str:
        return f"{self._connections} connections; {super().summary()}"

    def close(self) -> None:
        self._close_connection()
        super().close()

    def _connect(self) -> None:
        self._connections += 1
        self._connection = socket.create_connection(("127.0.0.1", self._port), SECONDS)
        self._frames_left = self._rng.randint(1, MOST_FRAMES)
        with suppress(OSError):
            match self._rng.randrange(4):
                case 0:
                    self._connection.sendall(self._rng.randbytes(self._rng.randrange(100)))
                case 1:
                    self._connection.sendall(self._corrupt(GREETING + READY))
                case _:
                    self._connection.sendall(GREETING + READY)

    def _close_connection(self) -> None:
        if self._connection is not None:
            if self._rng.random() < 0.5:  # with a reset
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01" + bytes(7))
            self._connection.close()
        self._connection = None

    def _frame(self) -> bytes:
        rng = self._rng
        body = rng.choice((self._valid_frame, b"", rng.randbytes(rng.randrange(300)), self._corrupt(self._valid_frame)))
        flags, length = rng.choice(FLAGS), rng.choice((len(body), len(body), rng.choice(LENGTHS)))
        if flags & 2:
            return bytes((flags,)) + length.to_bytes(8, "big") + body
        return bytes((flags, length & 0xFF)) + body

    def _corrupt(self, data: bytes) -> bytes:
        corrupted = bytearray(data)
        for _ in range(self._rng.randint(1, 3)):
            corrupted[self._rng.randrange(len(corrupted))] = self._rng.randrange(256)
        return bytes(corrupted[: self._rng.choice((len(corrupted), self._rng.randrange(len(corrupted))))])
