"""Clients not written in Python: curl, OpenAI's and Anthropic's for JavaScript, and Anthropic's tool runner.

`npm ci --prefix tests/server/npm` installs those for JavaScript, which need node 20 or newer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.harness.scripted_model import ANSWER, PLAIN, text_of
from tests.server.running_server import RunningServer

NPM = Path(__file__).parent / "npm"
HELLO: Any = [{"role": "user", "content": "hi"}]
PARIS = {"city": "Paris"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
FIELDS = {"sure": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["sure"], "additionalProperties": False}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
needs_npm = pytest.mark.skipif(
    shutil.which("node") is None or not (NPM / "node_modules" / "openai").is_dir(),
    reason="node or the packages of `npm ci --prefix tests/server/npm` are not installed",
)


def curl(server: RunningServer, **body: Any) -> str:
    """Returns what curl prints for a chat."""
    line = [
        "curl",
        "-sSN",
        "--fail-with-body",
        f"{server.url}/v1/chat/completions",
        "-H",
        "content-type: application/json",
    ]
    done = subprocess.run([*line, "-d", json.dumps(body)], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout


@needs_curl
def test_curl_reads_a_stream(chat: RunningServer) -> None:
    lines = [line.removeprefix("data: ") for line in curl(chat, messages=HELLO, stream=True).splitlines() if line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text_of(PLAIN)
    assert lines[-1] == "[DONE]"


@needs_curl
def test_curl_sends_a_tools_result(chat: RunningServer) -> None:
    message = json.loads(curl(chat, messages=HELLO, tools=[TOOL]))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == PARIS
    talk = [*HELLO, message, {"role": "tool", "tool_call_id": call["id"], "content": "22 C"}]
    answer = json.loads(curl(chat, messages=talk, tools=[TOOL]))
    assert answer["choices"][0]["message"]["content"] == text_of(ANSWER)


@needs_curl
def test_curl_gets_json_by_a_schema(chat: RunningServer, pair: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    for server in (chat, pair):
        answer = json.loads(curl(server, messages=HELLO, response_format=form, max_tokens=64))
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["sure"], bool)


@needs_npm
def test_openai_javascript_client_completes_a_whole_task(chat: RunningServer) -> None:
    done = subprocess.run(
        ["node", NPM / "client.mjs", chat.url], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert (results["text"], results["tokens"]) == (text_of(PLAIN), 5)
    assert (results["cities"], results["answer"]) == (["Paris"], text_of(ANSWER))
    assert results["sure"] == "boolean" and results["responded"] == text_of(PLAIN)
    assert json.loads(results["called"]) == PARIS
    assert results["refused"] == [404, "model_not_found"]


@needs_npm
def test_anthropic_javascript_client_runs_tools(chat: RunningServer) -> None:
    """Its runner requests a thread first, and continues without one."""
    done = subprocess.run(
        ["node", NPM / "anthropic.mjs", chat.url], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == {"whole": [["Paris"], text_of(ANSWER)], "streamed": [["Paris"], text_of(ANSWER)]}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_runs_tools(chat: RunningServer, stream: bool) -> None:
    from anthropic import Anthropic, beta_tool

    cities: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "22 C"

    with Anthropic(base_url=chat.url, api_key="none", max_retries=0) as claude:
        asked: Any = {"model": "chatty", "max_tokens": 100, "messages": HELLO, "tools": [get_weather]}
        if stream:
            texts = ["".join(turn.text_stream) for turn in claude.beta.messages.tool_runner(**asked, stream=True)]
        else:
            turns = list(claude.beta.messages.tool_runner(**asked))
            texts = ["".join(block.text for block in turn.content if block.type == "text") for turn in turns]
    assert (cities, texts) == (["Paris"], ["I look.", text_of(ANSWER)])


def test_package_lock_contains_no_urls() -> None:
    assert "://" not in (NPM / "package-lock.json").read_text(encoding="utf-8")


class Sure(BaseModel):
    sure: bool


def test_anthropics_client_parses_json_by_a_schema(chat: RunningServer, pair: RunningServer) -> None:
    from anthropic import Anthropic

    for server in (chat, pair):
        with Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
            name = claude.models.list().data[0].id
            answer = claude.messages.parse(model=name, max_tokens=64, messages=HELLO, output_format=Sure)
        assert isinstance(answer.parsed_output, Sure)
