"""A reader of the ingresses' HTTP that continues an interrupted text at the next ingress.

Tokens arrive as ids (`return_token_ids`), and the received ones are appended to the prompt of the next request. The
rest is the same text, because a token's noise depends on seed and position only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from outrider.bench.comparison.runs import Arrival
from tests.harness.requests import longest_wait
from tools.web.streams import read_events

PATH, TIMEOUT_SECONDS, RETRY_SECONDS = "/v1/completions", 60.0, 0.05
MAX_INTERRUPTIONS = 200
SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class WantedText:
    """A text to generate: `length` tokens after a prompt."""

    prompt: tuple[int, ...]
    length: int
    temp: float
    seed: int

    @property
    def body(self) -> dict[str, Any]:
        """The body of the API's request."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.length,
            "temperature": self.temp,
            "seed": self.seed,
            "ignore_eos": True,
        }


class IncompleteResponse(Exception):
    """An incomplete answer; the message says what arrived instead."""


@dataclass(slots=True)
class Reader:
    """Reads a text with `read`; records its tokens, their arrivals, and each interruption (`interruptions`)."""

    ingresses: Sequence[str]
    wanted: WantedText
    session: str
    tokens: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    interruptions: list[str] = field(default_factory=list)
    sent: float = 0.0

    def read(self) -> None:
        """Reads the whole text.

        Raises:
            IncompleteResponse: all ingresses failed, `MAX_INTERRUPTIONS` times.
        """
        self.sent = time.perf_counter()
        while len(self.tokens) < self.wanted.length:
            try:
                self._ask(self.ingresses[len(self.interruptions) % len(self.ingresses)])
            except (OSError, HTTPException, IncompleteResponse) as error:
                self.interruptions.append(f"{type(error).__name__}: {error}")
                if len(self.interruptions) > MAX_INTERRUPTIONS:
                    raise IncompleteResponse(self.interruptions[-1]) from None
                if len(self.interruptions) > 1:
                    time.sleep(RETRY_SECONDS)

    def has_continued(self, killed_at: float) -> bool:
        """Whether tokens have arrived since this time."""
        return bool(self.arrivals) and self.arrivals[-1].at > killed_at

    def wait(self, killed_at: float) -> float:
        """Returns the longest wait for a token after this time; tokens that were already sent arrive at once."""
        return longest_wait(self.arrivals, killed_at)

    def _ask(self, ingress: str) -> None:
        for event in stream_events(ingress, self._body(), self.session):
            self._record(event)

    def _record(self, event: dict[str, Any]) -> None:
        new = [token for choice in event["choices"] for token in choice.get("token_ids", ())]
        if new:
            self.tokens += new
            self.arrivals.append(Arrival(time.perf_counter(), len(new)))

    def _body(self) -> dict[str, Any]:
        rest = replace(self.wanted, prompt=(*self.wanted.prompt, *self.tokens))
        return {**rest.body, "max_tokens": self.wanted.length - len(self.tokens), "return_token_ids": True}


def stream_events(ingress: str, body: dict[str, Any], session: str = "") -> Iterator[dict[str, Any]]:
    """Yields the events of a streamed completion.

    Raises:
        IncompleteResponse: the request is refused, or the stream has an error or is incomplete.
        OSError, HTTPException: the connection failed.
    """
    connection = HTTPConnection(urlsplit(ingress).netloc, timeout=TIMEOUT_SECONDS)
    try:
        headers = {"content-type": "application/json", **({SESSION_HEADER: session} if session else {})}
        connection.request("POST", PATH, json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise IncompleteResponse(f"{answer.status}: {answer.read(400).decode(errors='replace')}")
        for data in read_events(answer):
            if data.startswith(b"[DONE]"):
                return
            event = json.loads(data)
            if "error" in event:
                raise IncompleteResponse(str(event["error"]["message"]))
            yield event
        raise IncompleteResponse("the stream ended before its text")
    finally:
        connection.close()
