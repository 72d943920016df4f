"""Who comes in, and with how much: hosts, keys, sizes of bodies, and how many answers each caller may be given at
once.

`AuthMiddleware`: who comes in and with how much: hosts, keys, sizes of bodies; before any path is known. A body is read
whole, within a time, and handed on as one. Knows headers and bytes; knows no shape of any request.

`Callers`: who asks: the orchestrator lets its clients take turns, so whoever has a key, or an address, of its own is
one. Knows a request's headers and where it came from; the keys themselves are checked at the door.

`StreamLimiter`: how many answers each caller may be given at once. Counts; knows nothing of what the answers are.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.orchestrator.client.base_client import AsyncBaseClient
from outrider.orchestrator.client.client import AsyncClient
from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.messages import Stats
from outrider.server.problems import Problem, Refused

OPEN = frozenset({"/health", "/ready", "/"})
METRICS = "/metrics"
"""Open on loopback, too: it tells numbers, no texts."""
PAGE = "/page/"
"""Whose files are open, too."""
BODY_SECONDS = 60.0


def key_of(scope: Scope) -> str | None:
    """The API key that a request names, as OpenAI's clients or as Anthropic's send it."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" else None) or headers.get("x-api-key") or None


def is_anthropic(scope: Scope) -> bool:
    """Whether errors are to be written as Anthropic writes them."""
    return str(scope.get("path", "")).startswith("/v1/messages") or b"anthropic-version" in dict(scope["headers"])


class AuthMiddleware:
    """What every request goes through on its way in."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._open = OPEN | {METRICS} if settings.is_loopback else OPEN
        self._most = settings.max_body_mb * 2**20
        self._hosts = {"localhost", settings.host.lower()} if settings.is_loopback and not settings.api_keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._authorize(scope)
            receive = await self._with_body(scope, receive)
        except Refused as refused:
            await refuse(scope, send, refused.problem)
            return
        except ClientLeft:
            return
        await self._app(scope, receive, _without_body(scope, send) if scope["method"] == "HEAD" else send)

    def _authorize(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and not _is_ours(headers.get("host", ""), self._hosts):
            raise Refused("the Host header names another machine; ask for localhost or an address", status=403)
        given = (key_of(scope) or "").encode(errors="replace")
        # No key is compared to fewer or more than all of them, so that time tells nothing.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        is_open = scope["path"] in self._open or scope["path"].startswith(PAGE) or scope["method"] == "OPTIONS"
        if self._keys and not any(known) and not is_open:
            raise Refused(
                "no valid API key; expected one as a bearer token or as x-api-key", status=401, code="invalid_api_key"
            )

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that hands out the body, which has been read."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdigit() and int(stated) > self._most:
            raise self._too_large()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            raise Refused(f"the body did not come within {BODY_SECONDS:g} s", status=408) from None
        waiting = [body]

        async def handed_on() -> MutableMapping[str, Any]:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await receive()

        return handed_on

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(f"the body is larger than {self._most // 2**20} MB (--max-body-mb)", status=413)


class ClientLeft(Exception):
    """Whoever asked is gone before the question was complete."""


async def refuse(scope: Scope, send: Send, problem: Problem) -> None:
    """Answers with `problem`, in the words of the API that was asked."""
    body = problem.body(is_anthropic(scope), scope["state"]["request_id"])
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    if problem.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _without_body(scope: Scope, send: Send) -> Send:
    """Has `scope` answered like GET, and only the beginning of the answer sent on."""
    scope["method"] = "GET"

    async def begin(message: Message) -> None:
        scope["method"] = "HEAD"
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return begin


def _is_ours(host: str, hosts: set[str]) -> bool:
    """A page whose site's name was made to point here is not let in; with an address nobody can do that."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").lower()
    if name in hosts or not name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


MOST = 1024
PATIENCE_SECONDS = 10.0


def caller_of(request: Request) -> str:
    """Whoever sent `request`: their key, or their address."""
    return key_of(request.scope) or (request.client.host if request.client is not None else "")


def pseudonym(caller: str) -> str:
    """The same caller under a name that tells no key, for an orchestrator that may be another machine's."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16]


class CompletionBackend(Protocol):
    """Whoever completes texts for this server."""

    def client(self, request: Request) -> AsyncBaseClient:
        """The one to ask for whoever sent `request`."""

    async def stats(self) -> Stats:
        """What it does now. Raises OutriderError when it does not answer."""


class Callers:
    """A client of the orchestrator for each caller, those that asked last."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._clients: OrderedDict[str, AsyncClient] = OrderedDict()
        self._own = AsyncClient(endpoint, PATIENCE_SECONDS)

    def client(self, request: Request) -> AsyncClient:
        caller = caller_of(request)
        if caller not in self._clients:
            self._clients[caller] = AsyncClient(self._endpoint, PATIENCE_SECONDS)
            if len(self._clients) > MOST:
                self._clients.popitem(last=False)
        self._clients.move_to_end(caller)
        return self._clients[caller]

    async def stats(self) -> Stats:
        return await self._own.stats()


class StreamLimiter:
    """One server's; `most` None: as many as anybody likes."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    def take(self, caller: str) -> ExitStack:
        """A place that is the caller's until what is returned is closed.

        Raises:
            Refused: they have as many as they may.
        """
        if self._most is not None and self._taken[caller] >= self._most:
            raise Refused(
                f"{self._most} of your requests are running, the maximum (--max-streams-per-key); try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._taken[caller] += 1
        place = ExitStack()
        place.callback(self._leave, caller)
        return place

    def _leave(self, caller: str) -> None:
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
