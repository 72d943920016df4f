"""Requests streamed completions, and records when each event arrives. Uses the standard library, which costs little.

Events are parsed after the last one has arrived, so that the time of parsing is not measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from outrider.protocol.errors import WorkerError

PATH = "/v1/completions"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The times of a stream in seconds on one clock, its `chunks` with text, its `tokens`, and its text."""

    sent: float
    first: float
    ended: float
    chunks: int
    tokens: int
    text: str


class CompletionsClient:
    """Sends requests to the server at `url` over one persistent connection."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)

    def ask(self, body: dict[str, Any]) -> StreamTimes:
        """Sends a request, and returns the times of its stream.

        Raises:
            WorkerError: the request was refused, or the stream is incomplete.
        """
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        self._connection.request("POST", PATH, json.dumps(request), {"content-type": "application/json"})
        response = self._connection.getresponse()
        if response.status != 200:
            raise WorkerError(f"HTTP answered {response.status}: {response.read().decode()}; expected 200")
        return parse_stream(sent, [(time.perf_counter(), data) for data in read_events(response)])


def read_events(response: HTTPResponse) -> Iterator[bytes]:
    """Yields the data of each server-sent event when it arrives, until the connection ends."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield line[6:]


def parse_stream(sent: float, events: list[tuple[float, bytes]]) -> StreamTimes:
    """Parses the events of a stream.

    Raises:
        WorkerError: an event is an error, or the end is missing.
    """
    parsed = [(at, json.loads(data)) for at, data in events if data.strip() != b"[DONE]"]
    if not parsed or len(parsed) == len(events) or any("error" in event for _, event in parsed):
        raise WorkerError(f"a stream is incomplete: {events[-1][1].decode() if events else 'no event arrived'}")
    texts = [(at, event["choices"][0]["text"]) for at, event in parsed if event.get("choices")]
    with_text = [(at, text) for at, text in texts if text]
    tokens = next((event["usage"]["completion_tokens"] for _, event in parsed if event.get("usage")), 0)
    first = with_text[0][0] if with_text else parsed[0][0]
    return StreamTimes(sent, first, parsed[-1][0], len(with_text), tokens, "".join(text for _, text in texts))
