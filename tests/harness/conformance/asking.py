"""A server as a stranger asks it: plain HTTP, JSON and events, by the standard library alone."""

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
    """The server answered with an error: its status and its sentence."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status, self.words = status, words


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; `headers` by their names in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body; {} where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return {}

    @property
    def words(self) -> str:
        """The sentence of an error."""
        error = self.json.get("error", {}) if isinstance(self.json, dict) else {}
        return str(error.get("message", "")) if isinstance(error, dict) else str(error)

    def ok(self) -> Reply:
        """Itself. Raises Refusal for an error."""
        if self.status >= 400:
            raise Refusal(self.status, self.words)
        return self

    def lines(self, field: str) -> list[str]:
        """What stands behind each `field` of the events, in order."""
        text = self.body.decode(errors="replace").splitlines()
        return [line.removeprefix(f"{field}: ") for line in text if line.startswith(f"{field}: ")]

    def events(self) -> list[Any]:
        """The data of all events, but for the [DONE] at the end."""
        return [json.loads(line) for line in self.lines("data") if line != "[DONE]"]


class Server:
    """The one at `url`; `model` is its id."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "localhost", parts.port or 80
        self.model = str(self.send("GET", "/v1/models").ok().json["data"][0]["id"])

    def send(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON) -> Reply:
        """What comes back, whatever it is."""
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

    def whole(self, path: str, **body: Any) -> Any:
        """The answer's JSON. Raises Refusal."""
        return self.post(path, **body).ok().json

    def stream(self, path: str, **body: Any) -> list[Any]:
        """A stream's events. Raises Refusal."""
        return self.post(path, stream=True, **body).ok().events()


def choices(events: list[Any]) -> Iterator[Any]:
    """Every choice of every event, in order."""
    for event in events:
        yield from event["choices"]
