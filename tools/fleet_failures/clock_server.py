"""A server without a model that sends the time as text every few milliseconds.

All processes of this machine share the clock, so a receiver knows how long each chunk was under way.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from outrider.protocol.codec import decode, encode
from outrider.protocol.messages import (
    Done,
    Generate,
    Message,
    Started,
    Stats,
    StatsQuery,
    TextChunk,
    Timings,
    WorkerStats,
)

PACE_SECONDS = 0.008
TARGET = WorkerStats("target", "target-0", 0, "none", "none", 1, 1, 0, 0, state="ready")


class ClockServer(threading.Thread):
    """Serves at `endpoint` until `close`: one text at a time, with a chunk every `pace` seconds."""

    def __init__(self, pace: float = PACE_SECONDS) -> None:
        super().__init__(daemon=True, name="clock-server")
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._closing = threading.Event()
        self._pace = pace
        self.start()

    def run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(50):
                client, *frames = self._socket.recv_multipart()
                self._answer(client, decode(frames))
        self._socket.close()

    def close(self) -> None:
        self._closing.set()
        self.join()
        self._zmq.term()

    def _answer(self, client: bytes, message: Message) -> None:
        match message:
            case StatsQuery(request=request):
                self._send(client, Stats(request, "", (TARGET,), 0, 0, 0, 0, Timings(), 0, 0))
            case Generate(request=request, sampling=sampling):
                self._send(client, Started(request, 1, "ar", sampling.seed or 0, "none", ""))
                for _ in range(sampling.max_tokens):
                    time.sleep(self._pace)
                    self._send(client, TextChunk(request, f"{time.perf_counter_ns()} ", (0,)))
                self._send(client, Done(request, "length", Timings()))

    def _send(self, client: bytes, message: Message) -> None:
        self._socket.send_multipart([client, *encode(message)])
