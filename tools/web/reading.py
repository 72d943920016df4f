"""One stream of completions as its reader sees it: when each event came. By the standard library, which costs little.

What the events say is read when all have come, so that the reader's own work is not what is timed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from outrider.protocol.errors import WorkerError

PATH = "/v1/completions"
SECONDS = 600


@dataclass(frozen=True, slots=True)
class Heard:
    """Seconds on one clock; `chunks` that had text, `tokens` in all."""

    sent: float
    first: float
    ended: float
    chunks: int
    tokens: int
    text: str


class EventReader:
    """Asks the server at `url`, over one connection that is kept."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)

    def ask(self, body: dict[str, Any]) -> Heard:
        """
        Raises:
            WorkerError: it was refused, or broke off.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        self._connection.request("POST", PATH, json.dumps(asked), {"content-type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise WorkerError(f"HTTP answered {answer.status}: {answer.read().decode()}; expected 200")
        events: list[tuple[float, bytes]] = []
        while line := answer.readline():
            if line.startswith(b"data: "):
                events.append((time.perf_counter(), line[6:]))
        return heard(sent, events)


def heard(sent: float, events: list[tuple[float, bytes]]) -> Heard:
    """What events said that came at these times.

    Raises:
        WorkerError: one is an error, or the end is missing.
    """
    told = [(at, json.loads(data)) for at, data in events if data.strip() != b"[DONE]"]
    if not told or len(told) == len(events) or any("error" in event for _, event in told):
        raise WorkerError(f"a stream broke off: {events[-1][1].decode() if events else 'nothing came'}")
    texts = [(at, event["choices"][0]["text"]) for at, event in told if event.get("choices")]
    with_text = [(at, text) for at, text in texts if text]
    tokens = next((event["usage"]["completion_tokens"] for _, event in told if event.get("usage")), 0)
    first = with_text[0][0] if with_text else told[0][0]
    return Heard(sent, first, told[-1][0], len(with_text), tokens, "".join(text for _, text in texts))
