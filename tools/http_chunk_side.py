"""Runs the HTTP process of this checkout with a scripted orchestrator, for `http_chunk.py` of any checkout.

Reads a JSON object per line from stdin, {chunks, tokens, gap_ms}, requests a text of that kind, and answers {cpu_ms,
chunks}: user and system CPU time of all threads of the HTTP process, and the number of chunks with text that arrived.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import zmq

from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import messages
from outrider.protocol.codec import decode, encode
from tools.web.streams import CompletionsClient

PROMPT = list(range(100, 160))
BODY = {"prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "speculation": {"mode": "ssd"}}
WORD = " word"


def orchestrate(socket: zmq.Socket[bytes], pace: dict[str, float]) -> None:
    """Answers each request with a text at the current pace, whatever the request asks for."""
    while True:
        client, *frames = socket.recv_multipart()
        request = decode(frames)
        if not isinstance(request, messages.Generate):
            continue
        name, tokens = request.request, int(pace["tokens"])

        def send(message: messages.Message, to: bytes = client) -> None:
            socket.send_multipart([to, *encode(message)])

        send(messages.Started(name, len(PROMPT), "ssd", 1, "m", "d"))
        for _ in range(int(pace["chunks"])):
            time.sleep(pace["gap_ms"] / 1000)
            send(messages.TextChunk(name, WORD * tokens, (300,) * tokens))
        send(messages.Done(name, "length", messages.Timings()))


def cpu_clock_id(process: int) -> int:
    """Returns the id of a process's CPU clock (see clock_getcpuclockid(3))."""
    return ~process << 3 | 2


def main() -> None:
    pace: dict[str, float] = {}
    listener = HttpListener(HttpSettings(port=0))
    with TemporaryDirectory() as folder:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.bind(endpoint := f"ipc://{folder}/clients")
        Thread(target=orchestrate, args=(socket, pace), daemon=True).start()
        process = HttpProcess(listener, endpoint, find_model(str(TINY_TARGET)), Path(folder), ServeSettings())
        reader, clock = CompletionsClient(listener.url), cpu_clock_id(process.pid)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            pace.update(json.loads(line))
            before = time.clock_gettime_ns(clock)
            chunks = reader.ask(BODY).chunks
            time.sleep(0.05)  # work after the answer belongs to the request, too
            cpu_ms = (time.clock_gettime_ns(clock) - before) / 1e6
            print(json.dumps({"cpu_ms": cpu_ms, "chunks": chunks}), flush=True)
        process.close()
        listener.close()


if __name__ == "__main__":
    main()
