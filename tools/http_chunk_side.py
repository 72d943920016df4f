"""HTTP of this checkout before a played orchestrator, for `http_chunk.py`, also for that of another checkout.

Reads one JSON object a line from stdin, {chunks, tokens, gap_ms}, asks for a text that comes so, and answers {cpu_ms,
chunks}: the CPU of the HTTP process, all its threads and the system's part of it, and how many chunks with text came.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import zmq

from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.orchestrator.pairing.model_files import EMBEDDED_TARGET, find_model
from outrider.protocol import messages
from outrider.protocol.codec import decode, encode
from tools.web.reading import EventReader

PROMPT = list(range(100, 160))
ASKED = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "speculation": {"mode": "ssd"}}
WORD = " word"


def played(socket: zmq.Socket[bytes], pace: dict[str, float]) -> None:
    """Completes each text at the pace of that time, whatever was asked for."""
    while True:
        client, *frames = socket.recv_multipart()
        asked = decode(frames)
        if not isinstance(asked, messages.Generate):
            continue
        name, tokens = asked.request, int(pace["tokens"])

        def say(message: messages.Message, to: bytes = client) -> None:
            socket.send_multipart([to, *encode(message)])

        say(messages.Started(name, len(PROMPT), "ssd", 1, "m", "d"))
        for _ in range(int(pace["chunks"])):
            time.sleep(pace["gap_ms"] / 1000)
            say(messages.TextChunk(name, WORD * tokens, (300,) * tokens))
        say(messages.Done(name, "length", messages.Timings(turnaround_ms=(1.0,) * int(pace["chunks"]))))


def clock_of(process: int) -> int:
    """The clock of a process's CPU, to the nanosecond; see clock_getcpuclockid(3)."""
    return ~process << 3 | 2


def main() -> None:
    pace: dict[str, float] = {}
    listener = HttpListener(HttpSettings(port=0))
    with TemporaryDirectory() as folder:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.bind(endpoint := f"ipc://{folder}/clients")
        Thread(target=played, args=(socket, pace), daemon=True).start()
        process = listener.serve(endpoint, find_model(str(EMBEDDED_TARGET)), Path(folder), "warning")
        reader, clock = EventReader(listener.url), clock_of(process.pid)
        told: dict[str, Any] = {"ready": True}
        print(json.dumps(told), flush=True)
        for line in sys.stdin:
            pace.update(json.loads(line))
            before = time.clock_gettime_ns(clock)
            heard = reader.ask(ASKED)
            time.sleep(0.05)  # what follows an answer is the request's, too
            told = {"cpu_ms": (time.clock_gettime_ns(clock) - before) / 1e6, "chunks": heard.chunks}
            print(json.dumps(told), flush=True)
        process.close()
        listener.close()


if __name__ == "__main__":
    main()
