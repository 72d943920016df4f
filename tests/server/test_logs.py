"""With `--log-format json` all processes of a server log one object per line on stderr, without secrets."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import ModelError
from tests.server.running_server import RunningServer

KEY, QUERY = "sk-nobody-may-read-this", "token=nor-this"
Line = dict[str, Any]


def lines(server: RunningServer) -> list[Line]:
    """Returns all lines so far; a line that is not JSON fails the test."""
    assert server.log is not None
    return [json.loads(line) for line in server.log.read_text(encoding="utf-8").splitlines()]


def wait_for_line(server: RunningServer, wanted: Callable[[Line], bool]) -> Line:
    """Waits for the first such line: it may be written just after its answer was read."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        found = next(filter(wanted, lines(server)), None)
        if found is not None:
            return found
        time.sleep(0.02)
    raise TimeoutError("no such line was logged")


def test_every_log_line_is_a_json_object_with_time_level_and_message(pair: RunningServer) -> None:
    wait_for_line(pair, lambda line: line["process"] == "http")
    records = lines(pair)
    assert {"orchestrator", "http", "target-0", "draft-0"} <= {line["process"] for line in records}
    for line in records:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("debug", "info", "warning", "error") and line["message"] and line["logger"]


def test_access_line_is_linked_to_the_orchestrators_request_id(pair: RunningServer) -> None:
    asked = {"prompt": "def f(", "max_tokens": 5}
    headers = {"x-request-id": "find-me", "authorization": f"Bearer {KEY}"}
    httpx.post(f"{pair.url}/v1/completions?{QUERY}", json=asked, headers=headers, timeout=200).raise_for_status()
    access = wait_for_line(pair, lambda line: line.get("request") == "find-me" and "status" in line)
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert access["ms"] > 0 and re.fullmatch(r"[0-9a-f]{12}", access["caller"])
    choice = wait_for_line(pair, lambda line: line.get("request") == "find-me" and "client_request" in line)
    same = {"client_request": choice["client_request"], "process": "orchestrator"}
    ended = wait_for_line(pair, lambda line: same.items() <= line.items() and "ends" in line["message"])
    assert re.fullmatch(r"r\d+", ended["request"]) and "5 tokens: length" in ended["message"]


def test_refusals_are_logged_and_no_line_contains_a_secret(pair: RunningServer) -> None:
    headers = {"x-request-id": "refuse-me", "x-api-key": KEY}
    httpx.get(f"{pair.url}/nowhere?{QUERY}", headers=headers)
    refused = wait_for_line(pair, lambda line: line.get("request") == "refuse-me")
    assert (refused["path"], refused["status"]) == ("/nowhere", 404)
    others = {"x-request-id": "other-key", "x-api-key": f"{KEY}s"}
    httpx.get(f"{pair.url}/health", headers=others)
    assert wait_for_line(pair, lambda line: line.get("request") == "other-key")["caller"] != refused["caller"]
    assert pair.log is not None
    text = pair.log.read_text(encoding="utf-8")
    assert KEY not in text and QUERY not in text


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [(("--model", "/no/such"), ModelError.exit_code, "no such path"), (("--drafters", "0"), 2, "drafters is 0")],
)
def test_startup_failure_is_logged_as_json(flags: tuple[str, ...], code: int, words: str) -> None:
    line = python("-m", "outrider", "serve", "--no-http", "--log-format", "json", *flags)
    done = subprocess.run(line, env=child_environment(), capture_output=True, text=True, timeout=200, check=False)
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout) == (code, "")
    assert records[-1]["level"] == "error" and words in records[-1]["message"]


def test_logged_path_stays_encoded_and_is_truncated(pair: RunningServer) -> None:
    httpx.get(f"{pair.url}/%0aforged%22{'x' * 1000}", headers={"x-request-id": "long-path"})
    path = wait_for_line(pair, lambda line: line.get("request") == "long-path")["path"]
    assert path.startswith("/%0aforged%22xxx") and len(path) == 200
