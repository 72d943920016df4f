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

from outrider.orchestrator.http_settings import HttpOrder, HttpSettings, is_tracing_enabled
from outrider.protocol import process
from outrider.protocol.version import install_command
from outrider.server.app import build_app
from outrider.server.connection import Connection
from outrider.server.model.served import load_served_model
from outrider.server.server_context import OrchestratorClient

if TYPE_CHECKING:
    from outrider.server.tracing import Tracing

DRAIN_SECONDS = 3
KEEP_ALIVE_SECONDS = 75
MAX_HEADER_BYTES = 65_536
GC_THRESHOLD = 10_000
"""New objects between garbage collections. At Python's default of 700, these take a third of a request's time."""

log = logging.getLogger(__name__)


def main() -> None:
    """Serves until stdin closes."""
    order = msgspec.json.decode(sys.stdin.readline(), type=HttpOrder)
    process.configure_logging(order.log_level, order.log_format, "http", order.log_fd)
    model = load_served_model(order.model, Path(order.folder), order.settings.model_names, order.settings.tool_fallback)
    tracing = _set_up_tracing(order.settings, model.id)
    app = build_app(model, OrchestratorClient(order.endpoint), order.settings, tracing)
    server = uvicorn.Server(uvicorn_config(app, order.settings))

    def end_with_parent() -> None:
        while sys.stdin.readline():  # the only message: accept no new requests
            app.state.context.draining = True
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True, name="parent").start()
    gc.freeze()  # collections skip everything loaded so far
    gc.set_threshold(GC_THRESHOLD)
    server.run(sockets=[socket.socket(fileno=order.listener)])
    if tracing is not None:
        tracing.close()


def _set_up_tracing(settings: HttpSettings, model: str) -> Tracing | None:
    """Sets up tracing if it is configured. Otherwise returns None without importing OpenTelemetry."""
    if not is_tracing_enabled(settings, os.environ):
        return None
    try:
        from outrider.server.tracing import Tracing, create_exporter
    except ModuleNotFoundError as missing:
        log.warning("no spans are exported: %s; expected %s", missing, install_command("otel"))
        return None
    return Tracing(model, create_exporter(settings.otlp_endpoint))


def uvicorn_config(app: FastAPI, settings: HttpSettings) -> uvicorn.Config:
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
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


if __name__ == "__main__":
    main()
