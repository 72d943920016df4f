"""Sends requests to a server by plain HTTP, JSON and events, with the standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

SECONDS = 60
JSON = {"content-type": "application/json"}


class Refusal(Exception):
    """An error response: its status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response; `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; {} if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return {}

    @property
    def message(self) -> str:
        """The message of an error."""
        error = self.json.get("error", {}) if isinstance(self.json, dict) else {}
        return str(error.get("message", "")) if isinstance(error, dict) else str(error)

    def ok(self) -> Reply:
        """Returns the reply itself. Raises Refusal for an error."""
        if self.status >= 400:
            raise Refusal(self.status, self.message)
        return self

    def lines(self, field: str) -> list[str]:
        """Returns the values of this `field` of all events, in order."""
        text = self.body.decode(errors="replace").splitlines()
        return [line.removeprefix(f"{field}: ") for line in text if line.startswith(f"{field}: ")]

    def events(self) -> list[Any]:
        """Returns the data of all events, without the final [DONE]."""
        return [json.loads(line) for line in self.lines("data") if line != "[DONE]"]


class Server:
    """The server at `url`; `model` is its model's id."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "localhost", parts.port or 80
        self.model = str(self.send("GET", "/v1/models").ok().json["data"][0]["id"])

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON) -> Reply:
        """Sends a request, and returns the response, errors too."""
        connection = HTTPConnection(self._host, self._port, timeout=SECONDS)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, headers)

    def post(self, path: str, **body: Any) -> Reply:
        return self.send("POST", path, json.dumps(body).encode())

    def json(self, path: str, **body: Any) -> Any:
        """Returns the JSON of a response. Raises Refusal."""
        return self.post(path, **body).ok().json

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Returns the events of a stream. Raises Refusal."""
        return self.post(path, stream=True, **body).ok().events()


def choices(events: list[Any]) -> Iterator[Any]:
    """Yields every choice of every event, in order."""
    for event in events:
        yield from event["choices"]
