"""The HTTP server's process. It reads its settings from the first line of stdin, and ends when stdin closes.

The listening socket is inherited.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from fastapi import FastAPI

from outrider.orchestrator.http_settings import HttpOrder, HttpSettings, tracing_wanted
from outrider.protocol import process
from outrider.protocol.version import install
from outrider.server.app import application
from outrider.server.connection import Connection
from outrider.server.model.served import load_served
from outrider.server.server_context import CallerClients

if TYPE_CHECKING:
    from outrider.server.tracing import Tracing

DRAIN_SECONDS = 3
IDLE_SECONDS = 75
LONGEST_HEADERS = 65_536
GC_THRESHOLD = 10_000
"""New objects between garbage collections, which with Python's default of 700 take a third of a request's time."""

log = logging.getLogger(__name__)


def main() -> None:
    """Serves until stdin closes."""
    order = msgspec.json.decode(sys.stdin.readline(), type=HttpOrder)
    process.set_up(order.log_level, order.log_format, "http", order.log_fd)
    model = load_served(order.model, Path(order.folder), order.settings.model_names, order.settings.tool_fallback)
    tracing = _tracing(order.settings, model.id)
    app = application(model, CallerClients(order.endpoint), order.settings, tracing)
    server = uvicorn.Server(config(app, order.settings))

    def end_with_parent() -> None:
        while sys.stdin.readline():  # the only message: accept no new requests
            app.state.context.draining = True
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True, name="parent").start()
    gc.freeze()  # collections skip what is loaded by now
    gc.set_threshold(GC_THRESHOLD)
    server.run(sockets=[socket.socket(fileno=order.listener)])
    if tracing is not None:
        tracing.close()


def _tracing(settings: HttpSettings, model: str) -> Tracing | None:
    """Returns None, without importing OpenTelemetry, unless tracing is configured."""
    if not tracing_wanted(settings, os.environ):
        return None
    try:
        from outrider.server.tracing import Tracing, exporting
    except ModuleNotFoundError as missing:
        log.warning("no spans are exported: %s; expected %s", missing, install("otel"))
        return None
    return Tracing(model, exporting(settings.otlp_endpoint))


def config(app: FastAPI, settings: HttpSettings) -> uvicorn.Config:
    """Returns uvicorn's configuration."""
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
