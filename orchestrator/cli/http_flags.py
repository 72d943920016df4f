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
    group.add_argument("--host", default=HOST, help=f"default {HOST}; beyond loopback an API key is required")
    group.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free one")
    group.add_argument("--no-http", dest="http", action="store_false", help="only the Python client's socket")
    key = f"asked of everybody; may be given several times; also from {KEY_VARIABLE}"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=key)
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key a line")
    name = "what requests call the model, its id first; may be given several times"
    group.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help=name)
    origin = "pages that may ask from a browser, or *; may be given several times"
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    group.add_argument("--tls-cert", metavar="FILE", help="PEM; with --tls-key serves https")
    group.add_argument("--tls-key", metavar="FILE")
    body = f"largest request, default {MAX_BODY_MB}"
    group.add_argument("--max-body-mb", type=int, default=MAX_BODY_MB, metavar="MB", help=body)
    late = "an answer that takes longer is given up; default: none is"
    group.add_argument("--request-timeout", type=int, metavar="SECONDS", help=late)
    many = "answers at once to each key, or address where no key is named; default: any number"
    group.add_argument("--max-streams-per-key", type=int, metavar="N", help=many)
    spans = "where spans of traced requests go, like http://127.0.0.1:4318; else as OTEL_... in the environment say"
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
    )


def keys_in(path: Path | None) -> list[str]:
    """A file's API keys. Raises InvalidRequest where it can't be read or has none."""
    if path is None:
        return []
    keys = text_file.read(path, "API keys, one a line").split()
    if not keys:
        raise InvalidRequest(f"{path} has no API key in it; expected one a line")
    return keys


def keys_in_environment() -> list[str]:
    """Those of the variable."""
    return os.environ.get(KEY_VARIABLE, "").split()
