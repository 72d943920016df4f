"""The settings of the HTTP server: a frozen record that checks itself.

The HTTP server is a process of its own, in the folder `server/`, which this one must not import. The record is sent to
it as JSON on stdin, because it holds keys and other users can read command lines. Knows names and ranges; opens no
socket.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.protocol import values, version
from outrider.protocol.errors import InvalidRequest

HOST, PORT = "127.0.0.1", 8080
MAX_BODY_MB = 32
MOST_SECONDS = 86_400
COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address, access and limits of the HTTP server.

    - `port`: 0 is any free one. `tls_cert` and `tls_key`: PEM files.
    - `api_keys`: a request must have one of them; an empty tuple, for loopback only, requires none. `cors_origins`:
      pages of these origins may send requests from a browser (`*`: all).
    - `model_names`: the names of the model in requests, its id first; empty: its own name.
    - `max_body_mb`: the largest request body in MB. `request_timeout`: seconds after which an answer ends with an
      error; None: never. `max_streams_per_key`: simultaneous answers for each key, or for each address without keys;
      None: any number.
    - `otlp_endpoint`: the URL of a collector for the spans of traced requests; None: by the environment (OTEL_...).
    - `tool_fallback`: describe tools in the system prompt if the model's chat template has none.

    Raises:
        InvalidRequest: a value is out of range, or two exclude each other; the message says what is allowed.
    """

    host: str = HOST
    port: int = PORT
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    model_names: tuple[str, ...] = ()
    max_body_mb: int = MAX_BODY_MB
    request_timeout: int | None = None
    max_streams_per_key: int | None = None
    otlp_endpoint: str | None = None
    tool_fallback: bool = True

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise InvalidRequest("host is empty; expected an address such as 127.0.0.1, or a name")
        values.whole("port", self.port, 0, 65535)
        values.whole("max_body_mb", self.max_body_mb, 1, 4096)
        for name, most in (("request_timeout", MOST_SECONDS), ("max_streams_per_key", 1_000_000)):
            if getattr(self, name) is not None:
                values.whole(name, getattr(self, name), 1, most)
        if self.otlp_endpoint is not None:
            _check_collector(self.otlp_endpoint)
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise InvalidRequest("an API key is empty, or has spaces or non-ASCII characters; expected one ASCII word")
        if not self.api_keys and not self.is_loopback:
            raise InvalidRequest(
                f"host {self.host} is reachable from other machines and needs an API key; expected --api-key,"
                " --api-key-file or OUTRIDER_API_KEY, or a loopback host such as 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("TLS needs a certificate and its key; expected both --tls-cert and --tls-key, or none")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key)
        if not all(name.strip() for name in self.model_names):
            raise InvalidRequest("a served model's name is empty; expected a name for requests to use")
        for origin in self.cors_origins:
            _check_origin(origin)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the host."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert is not None else "http"


def tracing_wanted(settings: HttpSettings, environment: Mapping[str, str]) -> bool:
    """Whether spans are exported, by the settings or by OpenTelemetry's environment variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return settings.otlp_endpoint is not None or any(environment.get(name) for name in COLLECTORS)


def _check_certificate(cert: str, key: str) -> None:
    for path in (cert, key):
        if not Path(path).is_file():
            raise InvalidRequest(f"no such file: {path}; expected a PEM file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # or it would ask for one
    except OSError as error:
        raise InvalidRequest(
            f"TLS can't be served with {cert} and {key} ({error.strerror}); expected a certificate and its own key,"
            " both in PEM, the key without a password"
        ) from None


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
        raise InvalidRequest(f"cors_origin is {origin!r}; expected an origin such as https://host:port, or *")


def _check_collector(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InvalidRequest(f"otlp_endpoint is {url!r}; expected a collector's URL such as http://127.0.0.1:4318")
    version.require("otel", "otlp_endpoint")


@dataclass(frozen=True, slots=True)
class HttpOrder:
    """The order to the HTTP process: its settings, the orchestrator's endpoint, the model, the open socket.

    `log_fd`: the descriptor of the orchestrator's log.
    """

    settings: HttpSettings
    endpoint: str
    model: str
    folder: str
    listener: int
    log_level: str = "warning"
    log_format: str = "text"
    log_fd: int | None = None

    def to_json(self) -> str:
        """Returns the order as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> HttpOrder:
        """Returns the order that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(line)
        items = fields.pop("settings").items()
        settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in items}
        return cls(settings=HttpSettings(**settings), **fields)
