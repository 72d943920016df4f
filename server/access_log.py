"""What is seen of every request from outside, whatever becomes of it: its id, and its answer's status and time.

Stands before the door, so that what is turned away there is seen, too. Metrics count it, the log has a line of it, and
a span is made of it if its caller traces it; none of them ever has a key, a query or a body.
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

if TYPE_CHECKING:  # OpenTelemetry is there only where it is wanted
    from outrider.server.tracing import Tracing

CLOSED_BY_READER = 499
"""The status of an answer that nobody waited for."""
UNKNOWN = "other"
VERSION = "/v1"
"""What most paths stand below, and may stand without."""
LONGEST_PATH = 200
_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger(__name__)


class AccessLog:
    """Gives each request its id, and tells of its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else fresh_id()
        scope.setdefault("state", {})["request_id"] = request_id
        current_request.set(request_id)
        span = scope["state"]["span"] = self._tracing.request(scope) if self._tracing is not None else None
        began, status = time.monotonic(), CLOSED_BY_READER

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, named = message["status"], request_id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", named), (b"request-id", named)]
                self._metrics.answered(route_of(scope), status)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception:
            if status == CLOSED_BY_READER:  # nothing was told; whoever stands before this answers
                status = 500
                self._metrics.answered(route_of(scope), status)
            raise
        finally:
            if span is not None:
                span.ended(route_of(scope), status)
            if log.isEnabledFor(logging.INFO):
                self._tell(scope, status, 1000 * (time.monotonic() - began))

    def _tell(self, scope: Scope, status: int, ms: float) -> None:
        """The line of an access log. `caller` is the same for the same key until this process ends, and no key."""
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:LONGEST_PATH]
        told = {"method": scope["method"], "path": path, "status": status, "ms": round(ms, 1)}
        key = key_of(scope)
        if key is not None:
            told["caller"] = hashlib.blake2b(key.encode(), key=self._salt, digest_size=6).hexdigest()
        log.info("%s %s %d in %.1f ms", scope["method"], path, status, ms, extra=told)


def fresh_id() -> str:
    """For a request that has none of its own."""
    return f"req_{secrets.token_hex(12)}"


def route_of(scope: Scope) -> str:
    """The route's own path: what people type is no label. FastAPI may tell it without what its router stands below."""
    path = str(getattr(scope.get("route"), "path", UNKNOWN))
    is_below = path.startswith("/") and scope["path"].startswith(f"{VERSION}/")
    return VERSION + path if is_below and not path.startswith(f"{VERSION}/") else path
