"""What comes over a connection and is no request, or never becomes one: answered or closed, and nobody else notices."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.pair.model_files import EMBEDDED_TARGET
from outrider.server import connection
from outrider.server.__main__ import config
from outrider.server.app import application
from outrider.server.model.served import load_served


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """The server's own settings around an application without an orchestrator; headers must come in half a second."""
    settings = HttpSettings(port=0)
    app = application(load_served("m", EMBEDDED_TARGET, ("m",)), "ipc:///tmp/outrider-test-nobody", settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config(app, settings))
    thread = threading.Thread(target=server.run, args=([listener],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "HEADER_SECONDS", 0.5)
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()
    listener.close()


def said(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server answers to `parts`, until it closes the connection or has been silent for long."""
    with socket.create_connection(address, timeout=20) as client:
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


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"nonsense\r\n\r\n"], b"400"),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8 + b"\r\n\r\n"], b"400"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000], b"400"),
        ([b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"], b"400"),
        ([b"GET /health HTTP/1.0\r\n\r\n"], b"200"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], b"200"),
        ([b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
          b"Content-Length: 99999999999\r\n\r\n"], b"413"),
    ],
)  # fmt: skip
def test_what_is_no_request_has_its_status(address: tuple[str, int], parts: list[bytes], status: bytes) -> None:
    answer = said(address, *parts)
    assert answer.split(b" ")[1] == status and b"Traceback" not in answer


@pytest.mark.parametrize("parts", [[], [b"G"], [b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 9]])
def test_headers_that_drip_are_not_waited_for(address: tuple[str, int], parts: list[bytes]) -> None:
    assert said(address, *parts, pause=0.1) == b""


def test_who_says_nothing_disturbs_nobody(address: tuple[str, int]) -> None:
    silent = [socket.create_connection(address) for _ in range(50)]
    assert b" 200 " in said(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    for one in silent:
        one.close()
