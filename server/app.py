"""The ASGI application: its paths, what errors become, and the door before all of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import OutriderError
from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.access_log import CLOSED_BY_READER, VERSION, AccessLog
from outrider.server.auth_middleware import AuthMiddleware, CompletionBackend, is_anthropic
from outrider.server.endpoints import chat, completions, messages, page, responses, status
from outrider.server.endpoints.described import describe
from outrider.server.metrics import Metrics
from outrider.server.model.served import ServedModel
from outrider.server.problems import problem_of
from outrider.server.server_context import ReaderGone, ServerContext
from outrider.server.shapes.chat import ChatChunk

if TYPE_CHECKING:  # OpenTelemetry is there only where it is wanted
    from outrider.server.tracing import Tracing

LARGE = 16_384
"""Bytes of an answer that are worth their compression. Streams of events are never compressed."""

log = logging.getLogger(__name__)


def application(
    model: ServedModel, behind: CompletionBackend, settings: HttpSettings, tracing: Tracing | None = None
) -> FastAPI:
    """Everything, ready to be served: `model`, whose texts are completed by who stands `behind`."""
    # Pages that show a description would load their scripts from elsewhere; any viewer reads /openapi.json.
    app = FastAPI(
        title="Outrider",
        version=PACKAGE_VERSION,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    metrics = Metrics(model.id, model.context_length)
    app.state.context = ServerContext(model, behind, metrics, settings)
    for part in (chat.router, completions.router, responses.router, status.models_router):
        app.include_router(part, prefix=VERSION)
        app.include_router(part, include_in_schema=False)  # for base URLs that end before it
    app.include_router(messages.router, prefix=VERSION)
    for small in (status.text_router, status.router, page.router):
        app.include_router(small)
    app.mount("/page", page.files)
    describe(app, model.names, (ChatChunk,))
    for kind in (OutriderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _problem)
    app.add_exception_handler(ReaderGone, _gone)
    app.add_middleware(GZipMiddleware, minimum_size=LARGE, compresslevel=5)
    app.add_middleware(AuthMiddleware, settings=settings)
    app.add_middleware(AccessLog, metrics=metrics, tracing=tracing)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _problem(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, problem.message)
    body = problem.body(is_anthropic(request.scope), request.scope["state"]["request_id"])
    told = error.headers if isinstance(error, HTTPException) else None  # which methods there are, for one
    return Response(body, problem.status, headers={**(told or {}), **problem.headers}, media_type="application/json")


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLOSED_BY_READER)
