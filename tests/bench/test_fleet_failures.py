"""Fleet failures: readers continue at the next ingress, the clock server sends the time, a table shows what differs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.orchestrator.client.async_client import AsyncClient
from outrider.protocol.errors import InvalidRequest
from tools.fleet_failures.__main__ import parse_rows
from tools.fleet_failures.clock_server import ClockServer
from tools.fleet_failures.costs import lags_by_client
from tools.fleet_failures.kills import KillResult
from tools.fleet_failures.reader import IncompleteResponse, Reader, WantedText
from tools.fleet_failures.report import make_row, table

WANTED = WantedText((7, 8), 6, 0.8, 3)


@contextmanager
def ingress(limit: int, requests: list[dict[str, Any]]) -> Iterator[str]:
    """Serves tokens that equal their positions in the text, and closes the stream after `limit` tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append(body)
            self.send_response(200)
            self.end_headers()
            first = len(body["prompt"])
            for token in range(first, first + min(limit, body["max_tokens"])):
                event = {"choices": [{"text": "", "token_ids": [token]}]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if limit >= body["max_tokens"]:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_reader_continues_at_the_next_ingress() -> None:
    first, second = list[dict[str, Any]](), list[dict[str, Any]]()
    with ingress(4, first) as one, ingress(9, second) as other:
        reader = Reader([one, other], WANTED, "a session")
        reader.read()
    assert reader.tokens == [2, 3, 4, 5, 6, 7] and len(reader.interruptions) == 1
    assert first[0]["prompt"] == [7, 8] and first[0]["max_tokens"] == 6
    assert second[0]["prompt"] == [7, 8, 2, 3, 4, 5] and second[0]["max_tokens"] == 2
    assert second[0]["seed"] == first[0]["seed"] == 3


def test_a_reader_without_any_ingress_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.fleet_failures.reader.RETRY_SECONDS", 0.0)
    with ingress(0, []) as url, pytest.raises(IncompleteResponse, match="before its text"):
        Reader([url], WANTED, "").read()


def test_clock_server_sends_the_time_of_each_chunk() -> None:
    with closing(ClockServer(pace=0.0)) as server, asyncio.Runner() as runner:
        lags = lags_by_client(AsyncClient(server.endpoint), WANTED, runner)
    assert len(lags) == WANTED.length and all(lag > 0 for lag in lags)


def test_a_row_counts_texts_that_differ_and_exceeded_limits() -> None:
    fine = make_row("attached", [KillResult((0.5, 0.7), 2, 0, (), 3.0)])
    late = make_row("attached", [KillResult((1.6, 1.7), 2, 0, (), 3.0)])
    other = make_row("actor", [KillResult((0.1,), 1, 0, (), 3.0), KillResult((0.1,), 1, 1, ("gone", "gone"), 4.0)])
    gone = make_row("node", [], "it does not come back")
    assert [one.missed for one in (fine, late, other, gone)] == [False, True, True, True]
    assert "it does not come back" in table([gone]) and "it does not come back" in str(gone)
    assert other.errors == ("gone",) and other.broken == 2
    assert "| actor | 1 of 2 | 0.10 / 0.10 | 2 | 3.0, 4.0 |" in table([other])


def test_an_unknown_row_is_refused_by_name() -> None:
    assert parse_rows("actor, head") == ["actor", "head"]
    with pytest.raises(InvalidRequest, match="'hed'"):
        parse_rows("hed")
