"""HTTP uses any backend, and passes on the caller's identity."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from outrider.orchestrator.client.async_client import AsyncBaseClient, ChunkHandler
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.errors import EndpointError, ServerBusy
from outrider.protocol.messages import Stats, Timings, WorkerStats
from outrider.server import server_context
from outrider.server.app import build_app
from outrider.server.model.served import load_served_model

ROLES = ("target", "draft")
KEYS = ("first-key", "second-key")


class UnreachableClient(AsyncBaseClient):
    """A client of the orchestrator that can't answer; records the client's name of each request."""

    sources = 0

    def __init__(self) -> None:
        super().__init__()
        self.caller_names: list[str] = []

    def client(self, request: Request) -> AsyncBaseClient:
        return self

    async def stats(self) -> Stats:
        raise EndpointError("nobody is here; expected somebody")

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        self.caller_names.append(dialogue.first_message.client)
        raise EndpointError("nobody is here; expected somebody")


class SlowlyBusyClient(UnreachableClient):
    """A client of an orchestrator that takes a while to refuse each request."""

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        await asyncio.sleep(0.6)
        raise ServerBusy("all places are taken; try again later")


def test_late_refusal_of_a_stream_has_its_own_status() -> None:
    """A busy server answers late, and clients send a request again after status 429, but not after an error event."""
    app = build_app(load_served_model("m", TINY_TARGET, ("m",)), SlowlyBusyClient(), HttpSettings())

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", json={"prompt": "a", "stream": True})

    assert asyncio.run(ask()).status_code == 429


class SilentClient(UnreachableClient):
    """A client of an orchestrator in whose queue each request waits."""

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        self.caller_names.append("waits")
        try:
            await asyncio.Event().wait()
        finally:
            self.caller_names.append("cancelled")


def test_client_that_leaves_before_the_first_result_cancels_its_stream_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_context, "FIRST_RESULT_SECONDS", 3600.0)
    behind, sent = SilentClient(), list[Message]()
    app = build_app(load_served_model("m", TINY_TARGET, ("m",)), behind, HttpSettings())
    bodies: list[Message] = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}]

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        while not behind.caller_names:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions",
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert behind.caller_names == ["waits", "cancelled"] and sent[0]["status"] == 499


def test_caller_names_reveal_no_key_and_an_unreachable_backend_is_503() -> None:
    behind = UnreachableClient()
    app = build_app(load_served_model("m", TINY_TARGET, ("m",)), behind, HttpSettings(api_keys=KEYS))

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gate") as client:
            return [
                await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": key})
                for key in (*KEYS, KEYS[0])
            ]

    answers = asyncio.run(ask())
    assert [one.status_code for one in answers] == [503] * 3
    assert answers[0].json()["error"]["message"] == "nobody is here; expected somebody"
    first, second, again = behind.caller_names
    assert first == again != second and not any(key in name for key in KEYS for name in behind.caller_names)


@pytest.mark.parametrize(
    ("states", "code", "status"),
    [
        (("starting", "starting"), 503, "starting"),
        (("ready", "starting"), 503, "starting"),  # requests wait for the drafter's first load
        (("ready", "restarting"), 200, "ready"),
        (("ready", "refused"), 200, "ready"),
        (("restarting", "ready"), 503, "starting"),
    ],
)
def test_server_is_ready_once_its_requests_begin_at_once(states: tuple[str, str], code: int, status: str) -> None:
    class Backend(UnreachableClient):
        async def stats(self) -> Stats:
            workers = [
                WorkerStats(role, role, 1, "", "", 1, 1, 1, 1, state=state)
                for role, state in zip(ROLES, states, strict=True)
            ]
            return Stats("", "0", tuple(workers), 0, 0, 0, 0, Timings(), 0, 0)

    app = build_app(load_served_model("m", TINY_TARGET, ("m",)), Backend(), HttpSettings())

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
            return await client.get("/ready")

    answer = asyncio.run(ask())
    assert answer.status_code == code
    assert answer.json() == {"status": status, "workers": dict(zip(ROLES, states, strict=True))}
