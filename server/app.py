"""The ASGI application: its routes and middleware."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider import __version__
from outrider.orchestrator.http_settings import HttpSettings
from outrider.server.endpoints import chat, completions, messages, page, responses, status
from outrider.server.endpoints.json_route import extend_openapi
from outrider.server.metrics import Metrics
from outrider.server.middleware import API_PREFIX, AccessLogMiddleware
from outrider.server.model.served import ServedModel
from outrider.server.server_context import CompletionBackend, ServerContext

if TYPE_CHECKING:  # OpenTelemetry is optional
    from outrider.server.tracing import Tracing

MIN_COMPRESSED_BYTES = 16_384
"""Responses of at least this many bytes are compressed. Event streams never are."""

_REFUSED_GZIP = re.compile(r"gzip\s*;\s*q=0(\.0*)?\s*(,|$)", re.IGNORECASE)


def build_app(
    model: ServedModel, backend: CompletionBackend, settings: HttpSettings, tracing: Tracing | None = None
) -> FastAPI:
    """Returns the application that serves `model`. `backend` completes its texts."""
    # FastAPI's documentation pages load scripts from other hosts; endpoints/page.py has its own.
    app = FastAPI(
        title="Outrider",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    metrics = Metrics(model.id, model.context_length)
    app.state.context = ServerContext(model, backend, metrics, settings)
    for router in (chat.router, completions.router, responses.router, messages.router, status.models_router):
        app.include_router(router, prefix=API_PREFIX)
        app.include_router(router, include_in_schema=False)  # for base URLs without /v1
    for router in (status.text_router, status.router, page.router):
        app.include_router(router)
    app.mount("/page", page.files)
    extend_openapi(app, model.names, chat.ChatChunk)
    app.add_exception_handler(HTTPException, _raise_error)
    app.add_middleware(_Compression, minimum_size=MIN_COMPRESSED_BYTES, compresslevel=5)
    app.add_middleware(AccessLogMiddleware, settings=settings, metrics=metrics, tracing=tracing)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # browsers ask this before a page of a public site reaches loopback
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    return app


class _Compression(GZipMiddleware):
    """Compresses answers, but not for a client that refuses gzip by `q=0`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = _REFUSED_GZIP.search(Headers(scope=scope).get("accept-encoding", ""))
        await (self.app if refused else super().__call__)(scope, receive, send)


async def _raise_error(_request: Request, error: Exception) -> Response:
    """Leaves Starlette's own errors, such as a 404, to `AccessLogMiddleware`, as all others."""
    raise error
