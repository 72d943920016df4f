"""The process: the first line on stdin tells what to serve, over a socket that is open already; it ends with stdin."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from outrider.orchestrator.http_settings import HttpOrder, HttpSettings, tracing_wanted
from outrider.protocol import process
from outrider.protocol.version import install
from outrider.server.app import application
from outrider.server.auth_middleware import Callers
from outrider.server.connection import Connection, Server
from outrider.server.model.served import load_served

if TYPE_CHECKING:
    from outrider.server.tracing import Tracing

DRAIN_SECONDS = 3
IDLE_SECONDS = 75
LONGEST_HEADERS = 65_536
FEW_COLLECTIONS = 10_000
"""Python's 700 new things are a third of a request: each collection looks through all that is under way."""

log = logging.getLogger(__name__)


def main() -> None:
    """Serves until stdin ends."""
    order = HttpOrder.from_json(sys.stdin.readline())
    process.set_up(order.log_level, order.log_format, "http", order.log_fd)
    model = load_served(order.model, Path(order.folder), order.settings.model_names, order.settings.tool_fallback)
    tracing = _tracing(order.settings, model.id)
    app = application(model, Callers(order.endpoint), order.settings, tracing)
    server = Server(config(app, order.settings))

    def end_with_parent() -> None:
        while sys.stdin.readline():  # the one word there is: no new requests
            app.state.context.draining = True
        server.end()

    threading.Thread(target=end_with_parent, daemon=True, name="parent").start()
    gc.freeze()  # what is loaded by now stays: no collection has to look through it
    gc.set_threshold(FEW_COLLECTIONS)
    server.run(sockets=[socket.socket(fileno=order.listener)])
    if tracing is not None:
        tracing.close()


def _tracing(settings: HttpSettings, model: str) -> Tracing | None:
    """Where nobody asks for it OpenTelemetry is not even looked for."""
    if not tracing_wanted(settings, os.environ):
        return None
    try:
        from outrider.server.tracing import Tracing, exporting
    except ModuleNotFoundError as missing:
        log.warning("no spans are exported: %s; expected %s", missing, install("otel"))
        return None
    return Tracing(model, exporting(settings.otlp_endpoint))


def config(app: FastAPI, settings: HttpSettings) -> uvicorn.Config:
    """How uvicorn is to run."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


if __name__ == "__main__":
    main()
