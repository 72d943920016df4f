"""Errors are reported, and concurrent texts continue undisturbed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from outrider.server.model.served import load_served_model
from tests.harness.fuzz_http import CONTEXT_LENGTH, fuzz, set_context_length, tokenizer_cache_texts
from tests.harness.scripted_model import ENDLESS, write_scripted
from tests.server.running_server import RunningServer, serving

HELLO = [{"role": "user", "content": "hi"}]
LONG = {"messages": HELLO, "chat_template_kwargs": {"long": True}, "max_tokens": 1_000_000, "stream": True}
CHAT = "/v1/chat/completions"
TURN = "".join(ENDLESS[1:4])
TOOL = {"type": "function", "function": {"name": "f"}}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def schema(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": inner}}


WRONG: dict[str, tuple[dict[str, Any] | bytes, int]] = {
    "malformed JSON": (b'{"messages": [', 400),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
    "a huge body": (b" " * (33 * 2**20), 413),
    "a wrong type": ({"messages": HELLO, "temperature": "hot"}, 400),
    "an unknown model": ({"messages": HELLO, "model": "gpt-5"}, 404),
    "no messages": ({"messages": []}, 400),
    "a template error": ({"messages": [*HELLO, {"role": "refused", "content": "x"}]}, 400),
    "thousands of stop strings": ({"messages": HELLO, "stop": ["x"] * 5000}, 400),
    "n of 1,000": ({"messages": HELLO, "n": 1000}, 400),
    "a negative seed": ({"messages": HELLO, "seed": -1}, 400),
    "contradictory tools": ({"messages": HELLO, "tools": [TOOL, TOOL], "tool_choice": "required"}, 400),
    "a schema that can't be compiled": ({"messages": HELLO, "response_format": schema({"type": "nonsense"})}, 400),
    "a schema that can't be met": ({"messages": HELLO, "response_format": schema(False)}, 400),
}
ASKED = json.dumps(LONG).encode()
INCOMPLETE = {
    "nothing sent": b"",
    "headers that drip": HEAD,
    "a body that does not come": HEAD + b"Content-Length: 100\r\n\r\n{",
    "a reader who takes nothing": HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(ASKED), ASKED),
}


def words(lines: Iterator[str]) -> Iterator[str]:
    """Yields the text of a stream as it arrives."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""


def test_bad_requests_do_not_disturb_a_running_stream(chat: RunningServer) -> None:
    host, _, port = chat.url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        stream = stack.enter_context(httpx.stream("POST", f"{chat.url}{CHAT}", json=LONG, timeout=200))
        texts = words(stream.iter_lines())
        received = next(text for text in texts if text)
        for half in INCOMPLETE.values():
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=200))
            connection.sendall(half)
        for name, (body, status) in WRONG.items():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            refused = httpx.post(f"{chat.url}{CHAT}", content=content, headers=headers, timeout=200)
            assert refused.status_code == status, (name, refused.text)
            received += next(texts)
        assert chat.client.stats().active == 2  # the stream, and the answer that is not read
        for _ in range(20):
            received += next(texts)
    assert received == (TURN * len(received))[: len(received)] and len(received) > 20


def test_fuzzing_by_the_openapi_schema_finds_no_failure(chat: RunningServer, scripted: Path, tmp_path: Path) -> None:
    """A short form of `python -m tests.harness.fuzz_http`. Endless texts are cancelled soon."""
    with serving(chat.client.endpoint, scripted, tmp_path, request_timeout=1) as server:
        assert fuzz(server.url, tmp_path, seed=1, each=1, phases="fuzzing") == []


def test_the_fuzzer_fills_the_tokenizer_cache_with_texts_that_are_not_too_long(tmp_path: Path) -> None:
    folder = set_context_length(write_scripted(tmp_path / "model"), CONTEXT_LENGTH)
    model = load_served_model(str(folder), folder, ())
    counts = [len(model.encode(text, special=True)) for text in tokenizer_cache_texts()]
    assert sum(counts) > 10_000
