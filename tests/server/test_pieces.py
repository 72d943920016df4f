"""Pieces of a stream go straight to the connection, framed as HTTP/1.1 has it; in HTTP/1.0 as any answer does."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import WorkerError
from outrider.server.__main__ import config
from outrider.server.answers.sse import EventStream
from outrider.server.pieces import straight
from outrider.server.problems import Problem
from outrider.server.serving import Server

PIECES = [b"data: one\n\n", b"data: " + b"x" * 300 + b"\n\n"]
passed: list[int] = []


async def events() -> AsyncIterator[bytes]:
    for piece in PIECES:
        yield piece
    raise WorkerError("gone")


def failed(problem: Problem) -> bytes:
    return f"data: {problem.message}\n\n".encode()


async def closed() -> None:
    """Nothing is left."""


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    async def watched(message: Message) -> None:
        passed.append(len(message.get("body", b"")))
        await send(message)

    await EventStream(events(), failed, closed)(scope, receive, watched)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    set_up: uvicorn.Config = config(application, HttpSettings(port=0))  # type: ignore[arg-type]
    server = Server(set_up)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.end()
    thread.join()
    listener.close()


def test_pieces_are_whole_and_go_past_the_layers_between(address: tuple[str, int]) -> None:
    passed.clear()
    client = HTTPConnection(*address)
    for _ in range(2):  # the connection is as good as before
        client.request("POST", "/")
        assert client.getresponse().read() == b"".join([*PIECES, b"data: gone\n\n"])
    assert passed == [0, 0] * 2


def test_in_older_http_there_are_no_frames(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.sendall(b"POST / HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.partition(b"\r\n\r\n")[2] == b"".join([*PIECES, b"data: gone\n\n"])


def test_elsewhere_pieces_are_messages() -> None:
    told: list[object] = []

    async def send(message: object) -> None:
        told.append(message)

    asyncio.run(straight({"type": "http"}, send)(b"x"))  # type: ignore[arg-type]
    assert told == [{"type": "http.response.body", "body": b"x", "more_body": True}]
