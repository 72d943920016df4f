"""Access control: Host header, API keys, and each caller's own client of the orchestrator.

A caller is identified by API key, or by address if it sends none.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from functools import lru_cache
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient
from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.messages import Stats
from outrider.server.problems import Refused

PUBLIC = frozenset({"/health", "/ready", "/"})
METRICS = "/metrics"
"""Also public on loopback; it contains no texts."""
PAGE = "/page/"


def key_of(scope: Scope) -> str | None:
    """Returns the API key of a request, from `authorization` or `x-api-key`."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" else None) or headers.get("x-api-key") or None


class AuthMiddleware:
    """Checks each request before routing."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._public = PUBLIC | {METRICS} if settings.is_loopback else PUBLIC
        self._hosts = {"localhost", settings.host.lower()} if settings.is_loopback and not settings.api_keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._authorize(scope)
        except Refused as refused:
            await refused.problem.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, _without_body(scope, send) if scope["method"] == "HEAD" else send)

    def _authorize(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and not _is_ours(headers.get("host", ""), self._hosts):
            raise Refused("the Host header names another machine; ask for localhost or an address", status=403)
        given = (key_of(scope) or "").encode(errors="replace")
        # Every key is compared, so that the time does not depend on which one matches.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        is_public = scope["path"] in self._public or scope["path"].startswith(PAGE) or scope["method"] == "OPTIONS"
        if self._keys and not any(known) and not is_public:
            raise Refused(
                "no valid API key; expected one as a bearer token or as x-api-key", status=401, code="invalid_api_key"
            )


def _without_body(scope: Scope, send: Send) -> Send:
    """Turns HEAD into GET for the application, and drops the response's body."""
    scope["method"] = "GET"

    async def begin(message: Message) -> None:
        scope["method"] = "HEAD"
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return begin


def _is_ours(host: str, hosts: set[str]) -> bool:
    """Protects against DNS rebinding: only known names and IP addresses are accepted."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").lower()
    if name in hosts or not name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


MAX_CLIENTS = 1024
TIMEOUT_SECONDS = 10.0


def caller_of(request: Request) -> str:
    """Returns the caller's API key, or else its address."""
    return key_of(request.scope) or (request.client.host if request.client is not None else "")


def caller_hash(caller: str) -> str:
    """Returns a hash of the caller that does not reveal its key. The orchestrator may run on another machine."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16]


class CompletionBackend(Protocol):
    """What completes texts: one orchestrator, or a fleet."""

    def client(self, request: Request) -> AsyncBaseClient:
        """Returns the client to use for `request`."""

    async def stats(self) -> Stats:
        """Returns current statistics. Raises OutriderError if there is no answer."""


class CallerClients:
    """Keeps one orchestrator client per caller, because the orchestrator schedules fairly by client. The least recently
    used is dropped."""

    def __init__(self, endpoint: str) -> None:
        self._client_of = lru_cache(MAX_CLIENTS)(lambda caller: AsyncClient(endpoint, TIMEOUT_SECONDS))
        self._stats_client = AsyncClient(endpoint, TIMEOUT_SECONDS)

    def client(self, request: Request) -> AsyncClient:
        return self._client_of(caller_of(request))

    async def stats(self) -> Stats:
        return await self._stats_client.stats()
