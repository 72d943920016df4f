"""Connections without a valid or complete request are answered or closed, without effect on others."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPSConnection

import pytest
import uvicorn

from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.server import connection
from outrider.server.__main__ import uvicorn_config
from outrider.server.app import build_app
from outrider.server.model.served import load_served_model
from outrider.server.server_context import OrchestratorClient

TEXT, CLAUDE = "/v1/completions", "/v1/messages"


@contextmanager
def listening(settings: HttpSettings) -> Iterator[tuple[str, int]]:
    """Runs the application, without an orchestrator, with the server's own settings of uvicorn."""
    app = build_app(
        load_served_model("m", TINY_TARGET, ("m",)), OrchestratorClient("ipc:///tmp/outrider-test-nobody"), settings
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # one answer fills it
    server = uvicorn.Server(uvicorn_config(app, settings))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with listening(HttpSettings(port=0)) as where:
        yield where


def response_to(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """Returns the server's answer to `parts`, until it closes the connection or has long been silent."""
    with socket.create_connection(address, timeout=200) as client:
        for part in parts:
            try:
                client.sendall(part)
            except OSError:
                break  # it has closed the connection, as it may
            time.sleep(pause)
        answer = b""
        try:
            while data := client.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def head(path: str, *fields: bytes) -> bytes:
    """Returns the headers of a POST of JSON."""
    kind = b"Content-Type: application/json"
    return b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", kind, *fields, b"", b""])


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"nonsense\r\n\r\n"], b"400"),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8 + b"\r\n\r\n"], b"400"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000], b"431"),
        ([b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"], b"400"),
        ([b"GET /health HTTP/1.0\r\n\r\n"], b"200"),
        ([b"GET http://localhost:80/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], b"200"),
        ([b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], b"200"),
        ([b"GET http://localhost/health HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n"], b"403"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], b"200"),
        ([b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
          b"Content-Length: 99999999999\r\nConnection: close\r\n\r\n"], b"413"),
    ],
)  # fmt: skip
def test_raw_request_has_its_status(address: tuple[str, int], parts: list[bytes], status: bytes) -> None:
    answer = response_to(address, *parts)
    assert answer.split(b" ")[1] == status and b"Traceback" not in answer


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with short timeouts for receiving headers and sending answers."""
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(connection, "READER_TIMEOUT_SECONDS", 0.5)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("parts", [[], [b"G"], [b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 9]])
def test_connection_with_slow_headers_is_closed(address: tuple[str, int], parts: list[bytes]) -> None:
    assert response_to(address, *parts, pause=0.1) == b""


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("late", [b"x", b"x" * 9], ids=["part", "all"])
def test_connection_with_a_late_body_that_is_not_read_is_closed(address: tuple[str, int], late: bytes) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    assert status(response_to(address, asked, late, pause=0.2)) == 200


def test_silent_connections_do_not_delay_others(address: tuple[str, int]) -> None:
    silent = [socket.create_connection(address) for _ in range(50)]
    assert b" 200 " in response_to(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    for one in silent:
        one.close()


WRONG = [
    (head(TEXT, b"Content-Length: 2", b"Content-Length: 3") + b"{}", 400),
    (head(TEXT, b"Content-Length: 2", b"Transfer-Encoding: gzip, chunked") + b"{}", 400),
    (head(TEXT, b"Content-Length: 2x") + b"{}", 400),
    (head(TEXT, b"Host: elsewhere", b"Content-Length: 2") + b"{}", 400),
    (head(TEXT, b"Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n", 400),
    (head(CLAUDE, b"Transfer-Encoding: chunked") + b"2\r\n{}zz\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
]


@pytest.mark.parametrize(("sent", "code"), WRONG)
def test_invalid_http_is_refused_in_the_apis_error_format(address: tuple[str, int], sent: bytes, code: int) -> None:
    answer = response_to(address, sent)
    headers, _, body = answer.partition(b"\r\n\r\n")
    error_body = json.loads(body)
    assert status(answer) == code and b"connection: close" in headers.lower() and b"x-request-id" in headers.lower()
    assert error_body["error"]["message"] and (error_body.get("type") == "error") == (CLAUDE.encode() in sent)


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_an_invalid_body_of_a_request_that_is_refused_for_its_method_is_answered_once(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, method: bytes
) -> None:
    path = b"/health" if method == b"POST" else b"/v1/completions"
    asked = method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    answer = response_to(address, asked)
    assert status(answer) == 400 and answer.count(b"x-request-id") == 1
    assert answer.endswith(b"\r\n\r\n") == (method == b"HEAD")
    assert status(response_to(address, b"GET /health HTTP/1.0\r\n\r\n")) == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_chunked_request_body_is_read(address: tuple[str, int]) -> None:
    chunks = b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    answer = response_to(address, head(TEXT, b"Transfer-Encoding: chunked", b"Connection: close") + chunks)
    assert status(answer) == 400 and b"prompt" in answer


def test_endless_chunked_body_is_refused(address: tuple[str, int]) -> None:
    chunk = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    answer = response_to(address, head(TEXT, b"Transfer-Encoding: chunked", b"Connection: close"), *[chunk] * 40)
    assert status(answer) == 413


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("/nowhere", (), 404),
        ("/health", (), 405),
        (TEXT, (b"Content-Encoding: gzip",), 415),
        (TEXT, (), 413),
        (TEXT, (b"Transfer-Encoding: chunked",), 413),
    ],
)
def test_a_refused_body_is_read_to_its_end(
    address: tuple[str, int], path: str, fields: tuple[bytes, ...], code: int
) -> None:
    """Proxies report 502 instead of the refusal if the connection is closed while they send."""
    chunk = b" " * 2**20
    is_chunked = b"Transfer-Encoding: chunked" in fields
    if is_chunked:
        chunk = b"%x\r\n%s\r\n" % (len(chunk), chunk)
    else:
        fields += (b"Content-Length: %d" % (40 * 2**20),)
    with socket.create_connection(address, timeout=200) as client:
        client.sendall(head(path, *fields, b"Connection: close"))
        for _ in range(40):
            client.sendall(chunk)
        client.sendall(b"0\r\n\r\n" if is_chunked else b"")
        assert status(client.recv(65536)) == code


@pytest.mark.parametrize("path", ["/openapi.json", "/page/style.css", "/nowhere"])
def test_the_answer_to_head_has_no_body(address: tuple[str, int], path: str) -> None:
    first = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    answer = response_to(address, first, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    headers, _, after = answer.partition(b"\r\n\r\n")
    assert b"content-length: 0" not in headers and after.startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    wrong = head(TEXT, b"Content-Length: 2") + b"{}"
    answer = response_to(
        address, one + wrong + one + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400", b"200", b"200"]


def test_expect_100_continue_is_answered_with_continue_or_a_refusal(address: tuple[str, int]) -> None:
    wanted = (b"Expect: 100-continue", b"Connection: close")
    with socket.create_connection(address, timeout=200) as client:
        client.sendall(head(TEXT, b"Content-Length: 2", *wanted))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"{}")
        assert status(client.recv(65536)) == 400
    assert status(response_to(address, head(TEXT, b"Content-Length: 99999999999", *wanted))) == 413


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_unknown_upgrade_is_ignored(
    address: tuple[str, int], protocol: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word: Java's HTTP client offers h2c with each request."""
    more = b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n"
    assert status(response_to(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n")) == 200
    assert not caplog.records


@pytest.mark.parametrize("asked", [b"", b"GET /heal", head(TEXT, b"Content-Length: 20") + b"{}"])
def test_a_client_that_closes_within_a_request_is_disconnected(address: tuple[str, int], asked: bytes) -> None:
    with socket.create_connection(address, timeout=200) as client:
        client.sendall(asked)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(65536) == b""


@pytest.mark.usefixtures("short_timeouts")
def test_connection_of_a_client_that_reads_nothing_is_closed(address: tuple[str, int]) -> None:
    """Also if it is sent complete answers: the server keeps in memory what the system's buffers can't hold."""
    many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(address)
        client.sendall(many)
        with pytest.raises(OSError):
            while True:  # until the server has closed the connection
                client.send(b"\r\n")
                time.sleep(0.05)


@pytest.mark.usefixtures("short_timeouts")
def test_a_client_that_reads_slowly_gets_the_whole_answer(address: tuple[str, int]) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(address)
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := client.recv(8192):
            answer += data
            time.sleep(0.05)
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in headers


def test_excess_connections_are_refused_and_open_ones_continue(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = HTTPConnection(*address, timeout=200)

    def healthy() -> bool:
        first.request("GET", "/health")
        return first.getresponse().read() == b'{"status":"ok"}'

    assert healthy()
    monkeypatch.setattr(connection, "FILES_PER_CONNECTION", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    refused = response_to(address)
    assert status(refused) == 503 and b"the maximum" in refused and b"retry-after" in refused
    assert healthy()
    monkeypatch.undo()
    first.close()
    assert b" 200 " in response_to(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The paths of a certificate for localhost and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, which makes the certificate")
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=localhost")
    made = ["openssl", "req", "-x509", "-nodes", *kind, "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_https_is_served_with_a_certificate_and_plain_http_is_not(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with listening(HttpSettings(port=0, tls_cert=cert, tls_key=key)) as (_, port):
        trusting = ssl.create_default_context(cafile=cert)
        client = HTTPSConnection("localhost", port, timeout=200, context=trusting)
        client.request("GET", "/health")
        assert client.getresponse().read() == b'{"status":"ok"}'
        client.close()
        assert response_to(("127.0.0.1", port), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""


def test_an_idle_https_client_does_not_delay_the_end(
    certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """It reads nothing, so it does not answer TLS's close_notify."""
    cert, key = certificate
    with listening(HttpSettings(port=0, tls_cert=cert, tls_key=key)) as (_, port):
        idle = HTTPSConnection("localhost", port, timeout=200, context=ssl.create_default_context(cafile=cert))
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
    idle.close()
    assert "graceful shutdown exceeded" not in caplog.text
