"""An idle server sleeps, still shuts down on request and renews its date; its memory stays bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from outrider.orchestrator.machine.http_process import GLIBC, LARGE_PAGES, large_pages
from outrider.server import connection
from outrider.server.connection import Server

NEVER = 1e6


async def nobody(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """An application that answers nothing."""


def server() -> Server:
    return Server(uvicorn.Config(nobody, lifespan="off", log_config=None))


@pytest.mark.parametrize(
    "told", [Server.end, lambda one: one.handle_exit(signal.SIGTERM, None)], ids=["word", "signal"]
)
def test_a_signal_ends_the_server_without_waiting_for_the_next_tick(
    told: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", NEVER)

    async def run() -> None:
        one = server()
        serves = asyncio.create_task(one.main_loop())
        await asyncio.sleep(0)
        threading.Thread(target=told, args=(one,)).start()
        await serves

    asyncio.run(run())


def test_a_word_that_came_before_it_began_is_heard() -> None:
    one = server()
    one.end()
    asyncio.run(one.main_loop())


def test_the_date_is_renewed_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.001)
    dates = iter(["Mon", "Tue", "Wed"])
    monkeypatch.setattr(uvicorn.server, "formatdate", lambda _now, usegmt: next(dates, "Thu"))

    async def run() -> None:
        one = server()
        serves = asyncio.create_task(one.main_loop())
        while one.server_state.default_headers[:1] != [(b"date", b"Thu")]:
            await asyncio.sleep(0.001)
        one.end()
        await serves

    asyncio.run(run())


@pytest.mark.parametrize(
    ("system", "asked"),
    [("glibc 2.35", LARGE_PAGES), ("glibc 2.41.9000", LARGE_PAGES), ("glibc 2.34", {}), (None, {}), ("musl 3.0", {})],
)
def test_large_pages_are_enabled_where_the_systems_allocator_has_them(
    system: str | None, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr_names", {GLIBC: 2})
    monkeypatch.setattr(os, "confstr", lambda _: system)
    assert large_pages() == asked


def test_a_system_that_names_no_c_library_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr_names", {})
    assert large_pages() == {}
