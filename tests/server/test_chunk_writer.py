"""Chunks of a stream are written directly to the connection, with chunked encoding in HTTP/1.1 only."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from outrider.orchestrator.http_settings import HttpSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from outrider.server.__main__ import uvicorn_config
from outrider.server.answers.choices import ChoiceState, PartUpdate, Splitter, StreamItem, TextPart
from outrider.server.connection import _CYCLE_EXTENSION, chunk_writer
from outrider.server.model.served import TokenizedPrompt
from outrider.server.problems import Problem
from outrider.server.server_context import EventStream, RequestRun

BEGIN = b"data: begun\n\n"
PIECES = [b"data: one\n\n", b"data: " + b"x" * 300 + b"\n\n"]
WHOLE = [BEGIN, *PIECES, b"data: gone\n\n"]
CHOICE = ChoiceState(0, TokenizedPrompt(()), SamplingParams(), Splitter())
passed: list[int] = []


class ScriptedRun(RequestRun):
    """A run that has PIECES ready and fails after them."""

    is_done = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self._left: list[StreamItem] = [PartUpdate(CHOICE, TextPart(piece.decode())) for piece in PIECES]

    async def poll(self, max_seconds: float) -> list[StreamItem]:
        if self._left:
            return [self._left.pop(0)]
        raise WorkerError("gone")

    async def close(self) -> None:
        """Does nothing: there is no request to cancel."""


class PlainEvents:
    """Formats events as their text."""

    def begin(self) -> bytes:
        return BEGIN

    def format_item(self, one: StreamItem) -> bytes:
        assert isinstance(one, PartUpdate)
        return one.part.text.encode()  # type: ignore[union-attr]

    def end(self) -> bytes:
        return b""

    def format_error(self, problem: Problem) -> bytes:
        return f"data: {problem.message}\n\n".encode()


def stream(run: ScriptedRun) -> EventStream:
    return EventStream(run, PlainEvents())


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    async def record_and_send(message: Message) -> None:
        passed.append(len(message.get("body", b"")))
        await send(message)

    await stream(ScriptedRun())(scope, receive, record_and_send)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    set_up: uvicorn.Config = uvicorn_config(application, HttpSettings(port=0))  # type: ignore[arg-type]
    server = uvicorn.Server(set_up)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


def test_chunks_bypass_the_middleware_and_arrive_whole(address: tuple[str, int]) -> None:
    passed.clear()
    client = HTTPConnection(*address)
    for _ in range(2):  # the connection is reused
        client.request("POST", "/")
        assert client.getresponse().read() == b"".join(WHOLE)
    assert passed == [0, 0] * 2


def test_http_1_0_stream_is_not_chunked(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.sendall(b"POST / HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(WHOLE)


def test_chunks_are_asgi_messages_on_other_servers() -> None:
    messages: list[object] = []

    async def send(message: object) -> None:
        messages.append(message)

    write = chunk_writer({"type": "http"}, send)  # type: ignore[arg-type]
    asyncio.run(write(b"x"))  # type: ignore[arg-type]
    asyncio.run(write(b""))  # type: ignore[arg-type] # an empty chunk would end the body
    assert messages == [{"type": "http.response.body", "body": b"x", "more_body": True}]


class FakeCycle:
    """Stands in for uvicorn's request cycle. The client reads only while the writer waits for it."""

    def __init__(self) -> None:
        self.scope: Scope = {"type": "http", "http_version": "1.1", "extensions": {_CYCLE_EXTENSION: self}}
        self.flow = SimpleNamespace(write_paused=False, drain=self._drain)
        self.disconnected = False
        self.written: list[bytes] = []
        self.transport = SimpleNamespace(write=self.written.append)
        self.drained = 0

    async def send(self, message: Message) -> None:
        """Ignores the messages that begin and end the response."""

    async def _drain(self) -> None:
        self.flow.write_paused = False
        self.drained += 1

    async def serve(self, answer: EventStream) -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        await answer(self.scope, receive, self.send)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_chunk_waits_while_the_connection_is_paused() -> None:
    cycle = FakeCycle()
    cycle.flow.write_paused = True
    asyncio.run(cycle.serve(stream(ScriptedRun())))
    assert cycle.drained == 1
    assert cycle.written == list(map(framed, WHOLE))


def test_a_disconnected_client_is_sent_nothing() -> None:
    cycle = FakeCycle()
    cycle.disconnected = True
    asyncio.run(cycle.serve(stream(ScriptedRun())))
    assert cycle.written == []
