"""Records every request: its id, path, status and duration.

The middleware runs before authentication, so rejected requests are recorded too. It feeds the metrics, the access log
and the trace span. None of them contains a key, a query string or a body.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.protocol.process import current_request
from outrider.server.auth_middleware import key_of
from outrider.server.metrics import Metrics

if TYPE_CHECKING:  # OpenTelemetry is optional
    from outrider.server.tracing import Tracing

CLIENT_CLOSED_REQUEST = 499
"""The status recorded when the client disconnects before the response starts."""
UNKNOWN = "other"
VERSION = "/v1"
"""The prefix of most paths; they also work without it."""
LONGEST_PATH = 200
_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)


class AccessLog:
    """Assigns an id to each request and records its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else fresh_id()
        scope.setdefault("state", {})["request_id"] = request_id
        current_request.set(request_id)
        span = scope["state"]["span"] = self._tracing.request(scope) if self._tracing is not None else None
        began, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, named = message["status"], request_id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", named), (b"request-id", named)]
                self._metrics.count_response(route_of(scope), status)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception:
            if status == CLIENT_CLOSED_REQUEST:  # no response has started; an outer layer sends it
                status = 500
                self._metrics.count_response(route_of(scope), status)
            raise
        finally:
            if span is not None:
                span.ended(route_of(scope), status)
            if log.isEnabledFor(logging.INFO):
                ms = 1000 * (time.monotonic() - began)
                path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:LONGEST_PATH]
                fields = {"method": scope["method"], "path": path, "status": status, "ms": round(ms, 1)}
                if (key := key_of(scope)) is not None:  # a salted hash, stable while this process runs
                    fields["caller"] = hashlib.blake2b(key.encode(), key=self._salt, digest_size=6).hexdigest()
                log.info("%s %s %d in %.1f ms", scope["method"], path, status, ms, extra=fields)


def fresh_id() -> str:
    """Returns an id for a request that has none."""
    return f"req_{secrets.token_hex(12)}"


def route_of(scope: Scope) -> str:
    """Returns the route's path template, the metrics label. FastAPI may report it without the router's prefix."""
    path = str(getattr(scope.get("route"), "path", UNKNOWN))
    is_below = path.startswith("/") and scope["path"].startswith(f"{VERSION}/")
    return VERSION + path if is_below and not path.startswith(f"{VERSION}/") else path
