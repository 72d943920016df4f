"""The settings of the HTTP server: a frozen record that checks itself.

The HTTP server is a process of its own, in the folder `server/`, which this one must not import. The record is sent to
it as JSON on stdin, because it holds keys and other users can read command lines. Knows names and ranges; opens no
socket.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from outrider.orchestrator.settings import count, setting, switch
from outrider.protocol import values
from outrider.protocol.endpoints import Tcp, is_local
from outrider.protocol.errors import InvalidRequest

HTTP = "HTTP"
MAX_WAIT_SECONDS = 86_400


def _check_host(name: str, value: object) -> str:
    host = values.check_text(name, value)
    if not host.strip():
        raise InvalidRequest(f"{name} is empty; expected an address such as 127.0.0.1, or a name")
    return host


def _check_api_keys(name: str, value: object) -> tuple[str, ...]:
    keys = values.check_texts(name, value)
    if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise InvalidRequest("an API key is empty, or has spaces or non-ASCII characters; expected one ASCII word")
    return keys


def _check_model_names(name: str, value: object) -> tuple[str, ...]:
    names = values.check_texts(name, value)
    if not all(name.strip() for name in names):
        raise InvalidRequest("a served model's name is empty; expected a name for requests to use")
    return names


def _check_origins(name: str, value: object) -> tuple[str, ...]:
    origins = values.check_texts(name, value)
    for origin in origins:
        parts = urlsplit("")
        with suppress(ValueError):  # it is malformed, such as http://[
            parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise InvalidRequest(f"cors_origin is {origin!r}; expected an origin such as https://host:port, or *")
    return origins


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address, access and limits of the HTTP server; every field is a flag of `outrider serve`, with its help here.

    - `api_keys`: a request must have one of them; empty: none is required, on loopback only. `model_names`: the model's
      id first; empty: its own name. `cors_origins`: web pages of these origins may send requests.
    - `request_timeout`: seconds after which an answer ends with an error.

    Raises:
        InvalidRequest: a value is out of range, or two exclude each other; the message says what is allowed.
    """

    host: str = setting(
        "127.0.0.1", _check_host, HTTP, "ADDRESS",
        help="address to listen on; one that other machines reach needs --api-key",
    )  # fmt: skip
    port: int = count(8080, 0, 65535, HTTP, "PORT", help="port to listen on; 0: any free port")
    api_keys: tuple[str, ...] = setting(
        (), _check_api_keys, HTTP, "KEY", flag="api-key",
        help="require this key, or one in OUTRIDER_API_KEY, from clients; repeatable",
    )  # fmt: skip
    model_names: tuple[str, ...] = setting(
        (), _check_model_names, HTTP, "NAME", flag="served-model-name",
        help="a name of the model in requests; repeatable (default: its id or folder)",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), _check_origins, HTTP, "ORIGIN", flag="cors-origin",
        help="allow requests from web pages of this origin, or * for all; repeatable",
    )  # fmt: skip
    tls_cert: str | None = setting(
        None, values.check_text, HTTP, "FILE", help="certificate (PEM), to serve HTTPS with --tls-key (default: HTTP)"
    )
    tls_key: str | None = setting(None, values.check_text, HTTP, "FILE", help="private key (PEM) of --tls-cert")
    max_body_mb: int = count(32, 1, 4096, HTTP, "MB", help="maximum size of a request's body")
    request_timeout: int | None = count(
        None, 1, MAX_WAIT_SECONDS, HTTP, "SECONDS", help="cancel answers that take longer (default: no limit)"
    )
    max_streams_per_key: int | None = count(
        None, 1, 1_000_000, HTTP,
        help="maximum number of concurrent answers per API key, or per client address without one (default: no limit)",
    )  # fmt: skip
    tool_fallback: bool = switch(
        True, HTTP,
        help="refuse tools for a model whose chat template has none, instead of describing them in the system prompt",
    )  # fmt: skip

    def __post_init__(self) -> None:
        values.check_fields(self)
        if not self.api_keys and not self.is_loopback:
            raise InvalidRequest(
                f"host {self.host} is reachable from other machines and needs an API key; expected one in api_keys"
                " (--api-key), api_key_file or OUTRIDER_API_KEY, or a loopback host such as 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("TLS needs a certificate and its key; expected both --tls-cert and --tls-key, or none")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the host."""
        return is_local(Tcp(self.host, self.port))

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert is not None else "http"


def _check_certificate(cert: str, key: str) -> None:
    import ssl  # deferred: most commands do without

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


@dataclass(frozen=True, slots=True)
class HttpOrder:
    """What the HTTP process reads from stdin: its settings, the orchestrator's endpoint, the model, its socket.

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
