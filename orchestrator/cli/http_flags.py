"""The flags of `outrider serve` for HTTP, and the record they become."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from outrider.orchestrator.cli import text_file
from outrider.orchestrator.http_settings import HOST, MAX_BODY_MB, PORT, HttpSettings
from outrider.protocol import extras
from outrider.protocol.errors import InvalidRequest

KEY_VARIABLE = "OUTRIDER_API_KEY"


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    host = f"address to listen at; beyond loopback with --api-key (default: {HOST})"
    group.add_argument("--host", default=HOST, metavar="ADDRESS", help=host)
    group.add_argument("--port", type=int, default=PORT, help=f"port to listen at; 0: any free one (default: {PORT})")
    group.add_argument("--no-http", dest="http", action="store_false", help="serve Python clients only")
    key = f"a key that clients must send; repeatable (default: {KEY_VARIABLE} in the environment, else none)"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=key)
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="API keys, one a line (default: none)")
    name = "a name for the model in requests; repeatable (default: its id or folder)"
    group.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help=name)
    origin = "web pages that may ask from a browser, or *; repeatable (default: none)"
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate (PEM), to serve HTTPS with --tls-key (default: HTTP)"
    )
    group.add_argument("--tls-key", metavar="FILE", help="private key (PEM) of --tls-cert (default: none)")
    body = f"largest request that is accepted (default: {MAX_BODY_MB})"
    group.add_argument("--max-body-mb", type=int, default=MAX_BODY_MB, metavar="MB", help=body)
    late = "an answer that takes longer is cancelled (default: no limit)"
    group.add_argument("--request-timeout", type=int, metavar="SECONDS", help=late)
    many = "answers at once for each API key, or client address if no key is sent (default: no limit)"
    group.add_argument("--max-streams-per-key", type=int, metavar="N", help=many)
    spans = "where traces go, like http://127.0.0.1:4318 (default: OTEL_... in the environment)"
    worded = "refuse tools for a model whose chat template has none, instead of describing them in the system prompt"
    group.add_argument("--no-tool-fallback", dest="tool_fallback", action="store_false", help=worded)
    group.add_argument("--otlp-endpoint", metavar="URL", help=spans)


def settings_of(options: argparse.Namespace) -> HttpSettings | None:
    """None when no HTTP is wanted.

    Raises:
        InvalidRequest: a value is out of range, the file of keys can't be read, or what serves HTTP is not installed.
    """
    if not options.http:
        return None
    extras.require("serve", "HTTP", otherwise="--no-http")
    return HttpSettings(
        host=options.host,
        port=options.port,
        api_keys=(*options.api_key, *keys_in(options.api_key_file), *keys_in_environment()),
        cors_origins=tuple(options.cors_origin),
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        model_names=tuple(options.served_model_name),
        max_body_mb=options.max_body_mb,
        request_timeout=options.request_timeout,
        max_streams_per_key=options.max_streams_per_key,
        otlp_endpoint=options.otlp_endpoint,
        tool_fallback=options.tool_fallback,
    )


def keys_in(path: Path | None) -> list[str]:
    """A file's API keys. Raises InvalidRequest where it can't be read or has none."""
    if path is None:
        return []
    keys = text_file.read(path, "API keys, one a line").split()
    if not keys:
        raise InvalidRequest(f"{path} contains no API key; expected one per line")
    return keys


def keys_in_environment() -> list[str]:
    """Those of the variable."""
    return os.environ.get(KEY_VARIABLE, "").split()
