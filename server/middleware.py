"""The middleware of every request: its id, access control, errors, and the record of its end."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import OutriderError
from outrider.protocol.process import current_request
from outrider.server.metrics import Metrics
from outrider.server.problems import CLIENT_CLOSED_REQUEST, Problem, to_problem

if TYPE_CHECKING:  # OpenTelemetry is optional
    from outrider.server.tracing import Tracing

API_PREFIX = "/v1"
"""The prefix of most paths; they also work without it."""
MAX_PATH_LENGTH = 200
DISCARD_SECONDS = 2.0  # for the rest of a refused body: a proxy that still sends would report a lost connection
_ORIGIN = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # begins a target in absolute form, as some proxies send it
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)
PUBLIC_PATHS = frozenset({"/health", "/ready", "/"})
LOOPBACK_PATHS = PUBLIC_PATHS | {"/metrics"}  # which contains no prompts or answers


class AccessLogMiddleware:
    """Assigns an id to each request, refuses those without access, answers errors, and records how each request ended,
    for the metrics, the access log and the trace span, none of which contains a key, a query string or a body."""

    def __init__(self, app: ASGIApp, settings: HttpSettings, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app = app
        self._access = AccessRules(settings)
        self._metrics = metrics
        self._tracing = tracing
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given, more_body = headers.get("x-request-id", ""), "expect" not in headers  # Expect: it is sent only when read
        request_id = given if _REQUEST_ID.fullmatch(given) else fresh_id()
        scope.setdefault("state", {})["request_id"] = request_id
        current_request.set(request_id)
        span = scope["state"]["span"] = self._tracing.start_request(scope) if self._tracing is not None else None
        inner = {**scope, "path": _ORIGIN.sub("", scope["path"]).rstrip("/") or "/"}  # a redirection might name http
        inner["method"] = "GET" if scope["method"] == "HEAD" else scope["method"]  # uvicorn drops the body
        began, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def read() -> Message:
            nonlocal more_body
            message = await receive()
            more_body = message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                with suppress(TimeoutError):
                    async with asyncio.timeout(DISCARD_SECONDS):
                        while more_body and message["status"] >= 400:
                            await read()
                status, named = message["status"], request_id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", named), (b"request-id", named)]
                self._metrics.count_response(get_route(inner), status)
            await send(message)

        try:
            self._access.check(inner)
            await self._app(inner, read, answer)
        except Exception as error:
            problem = to_problem(error)
            if status == CLIENT_CLOSED_REQUEST:  # no response has started
                await problem.response(inner)(inner, read, answer)
            if isinstance(error, OutriderError | HTTPException | ClientDisconnect):
                if problem.status >= 500:
                    log.warning("%s %s: %s", scope["method"], inner["path"], problem.message)
                return
            raise
        finally:
            if span is not None:
                span.end(get_route(inner), status)
            if log.isEnabledFor(logging.INFO):
                ms = 1000 * (time.monotonic() - began)
                path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:MAX_PATH_LENGTH]
                fields = {"method": scope["method"], "path": path, "status": status, "ms": round(ms, 1)}
                if (key := get_api_key(scope)) is not None:  # a salted hash, stable while this process runs
                    fields["caller"] = hashlib.blake2b(key.encode(), key=self._salt, digest_size=6).hexdigest()
                log.info("%s %s %d in %.1f ms", scope["method"], path, status, ms, extra=fields)


def fresh_id() -> str:
    """Returns an id for a request that has none."""
    return f"req_{secrets.token_hex(12)}"


def get_route(scope: Scope) -> str:
    """Returns the route's path template, the metrics label. FastAPI may report it without the router's prefix."""
    path = str(getattr(scope.get("route"), "path_format", "other"))
    is_below = path.startswith("/") and scope["path"].startswith(f"{API_PREFIX}/")
    return API_PREFIX + path if is_below and not path.startswith(f"{API_PREFIX}/") else path


def get_api_key(scope: Scope) -> str | None:
    """Returns the API key of a request, from `authorization` or `x-api-key`."""
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" else None) or headers.get("x-api-key") or None


class AccessRules:
    """Checks requests before routing, by `Host` header and API key."""

    def __init__(self, settings: HttpSettings) -> None:
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._public = LOOPBACK_PATHS if settings.is_loopback else PUBLIC_PATHS
        self._hosts = {"localhost", settings.host.lower()} if settings.is_loopback and not settings.api_keys else None

    def check(self, scope: Scope) -> None:
        """Raises Problem for a request that is refused."""
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts is not None and not _is_known_host(headers.get("host", ""), self._hosts):
            raise Problem(
                "the Host header names another machine; use localhost, an IP address or --api-key", status=403
            )
        given = (get_api_key(scope) or "").encode(errors="replace")
        # Every key is compared, so that the time does not depend on which one matches.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        is_public = path in self._public or f"{path}/".startswith("/page/") or scope["method"] == "OPTIONS"
        if self._keys and not any(known) and not is_public:
            raise Problem(
                "no valid API key; expected one as a bearer token or as x-api-key", status=401, code="invalid_api_key"
            )


def _is_known_host(host: str, hosts: set[str]) -> bool:
    """Protects against DNS rebinding: only known names and IP addresses are accepted."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").removesuffix(".").lower()
    with suppress(ValueError):
        return name in hosts or not name or bool(ipaddress.ip_address(name))
    return False
