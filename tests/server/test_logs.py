"""With `--log-format json` all processes of a server log one object per line on stderr, without secrets."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import ModelError
from tests.server.house import House

KEY, QUERY = "sk-nobody-may-read-this", "token=nor-this"
Line = dict[str, Any]


def lines(house: House) -> list[Line]:
    """Returns all lines so far; one that is no JSON fails the test."""
    assert house.log is not None
    return [json.loads(line) for line in house.log.read_text(encoding="utf-8").splitlines()]


def heard(house: House, wanted: Callable[[Line], bool]) -> Line:
    """Waits for the first such line: it may be written just after its answer was read."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        found = next(filter(wanted, lines(house)), None)
        if found is not None:
            return found
        time.sleep(0.02)
    raise TimeoutError("nobody logged it")


def test_every_line_of_every_process_is_an_object_with_a_time_a_level_and_words(pair: House) -> None:
    heard(pair, lambda line: line["process"] == "http")
    told = lines(pair)
    assert {"orchestrator", "http", "target-0", "draft-0"} <= {line["process"] for line in told}
    for line in told:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("debug", "info", "warning", "error") and line["message"] and line["logger"]


def test_an_answer_has_a_line_with_the_orchestrators_id_of_its_request(pair: House) -> None:
    asked = {"prompt": "def f(", "max_tokens": 5}
    headers = {"x-request-id": "find-me", "authorization": f"Bearer {KEY}"}
    httpx.post(f"{pair.url}/v1/completions?{QUERY}", json=asked, headers=headers, timeout=200).raise_for_status()
    access = heard(pair, lambda line: line.get("request") == "find-me" and "status" in line)
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert access["ms"] > 0 and re.fullmatch(r"[0-9a-f]{12}", access["caller"])
    choice = heard(pair, lambda line: line.get("request") == "find-me" and "client_request" in line)
    same = {"client_request": choice["client_request"], "process": "orchestrator"}
    ended = heard(pair, lambda line: same.items() <= line.items() and "ends" in line["message"])
    assert re.fullmatch(r"r\d+", ended["request"]) and "5 tokens: length" in ended["message"]


def test_a_refusal_has_a_line_too_and_no_line_has_a_secret(pair: House) -> None:
    headers = {"x-request-id": "refuse-me", "x-api-key": KEY}
    httpx.get(f"{pair.url}/nowhere?{QUERY}", headers=headers)
    refused = heard(pair, lambda line: line.get("request") == "refuse-me")
    assert (refused["path"], refused["status"]) == ("/nowhere", 404)
    others = {"x-request-id": "other-key", "x-api-key": f"{KEY}s"}
    httpx.get(f"{pair.url}/health", headers=others)
    assert heard(pair, lambda line: line.get("request") == "other-key")["caller"] != refused["caller"]
    assert pair.log is not None
    text = pair.log.read_text(encoding="utf-8")
    assert KEY not in text and QUERY not in text


def test_a_server_that_cannot_begin_says_so_in_json_too(tmp_path: Path) -> None:
    line = python("-m", "outrider", "serve", "--no-http", "--log-format", "json", "--model", str(tmp_path / "none"))
    done = subprocess.run(line, env=child_environment(), capture_output=True, text=True, timeout=200, check=False)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == ModelError.exit_code and done.stdout == ""
    assert told[-1]["level"] == "error" and "no such path" in told[-1]["message"]


def test_a_path_is_logged_as_it_was_asked_and_not_at_any_length(pair: House) -> None:
    httpx.get(f"{pair.url}/%0aforged%22{'x' * 1000}", headers={"x-request-id": "long-path"})
    path = heard(pair, lambda line: line.get("request") == "long-path")["path"]
    assert path.startswith("/%0aforged%22xxx") and len(path) == 200
