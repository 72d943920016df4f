"""A log record is one line, whatever it contains; a server's processes log where the server does."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from outrider.protocol.process import JsonFormatter, current_request


def logged(message: str, *values: object, **extra: Any) -> dict[str, Any]:
    """Formats a record as JSON, and checks that it is one line of ASCII."""
    record = logging.getLogger("room").makeRecord("room", logging.WARNING, "", 0, message, values, None, extra=extra)
    line = JsonFormatter("target-0").format(record)
    assert "\n" not in line and line.isascii()
    found: dict[str, Any] = json.loads(line)
    return found


def test_json_log_line_has_its_message_and_only_known_fields() -> None:
    found = logged("of %d\n\ud800\u2028", 7, request="r1", round=3, password="x")
    assert (found["level"], found["logger"], found["process"]) == ("warning", "room", "target-0")
    assert found["message"] == "of 7\n\ud800\u2028" and (found["request"], found["round"]) == ("r1", 3)
    assert found["pid"] == os.getpid() and "password" not in found and "status" not in found


def test_text_log_line_escapes_what_can_not_be_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """A client names its requests, and could write lines into the log or clear a terminal."""
    program = (
        "import logging; from outrider.protocol import process; process.configure_logging('info', 'text', 'server')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.exception('refused %s', 'a\\n2026 server INFO \\x1b[2Jé')"
    )
    subprocess.run([sys.executable, "-c", program], timeout=200, check=True)
    line, *trace = capfd.readouterr().err.splitlines()
    assert line.endswith(r"server ERROR refused a\n2026 server INFO \x1b[2Jé"), line
    assert trace[0].startswith("Traceback") and trace[-1].startswith("ZeroDivisionError")


def test_log_line_without_a_request_gets_the_current_request() -> None:
    token = current_request.set("req_1")
    try:
        assert logged("x")["request"] == "req_1" and logged("x", request="r2")["request"] == "r2"
    finally:
        current_request.reset(token)
    assert "request" not in logged("x")


PROGRAM = """
import logging, sys, warnings
from outrider.protocol import process
process.configure_logging("info", sys.argv[1], "draft-0", int(sys.argv[2]))
logging.info("begun"); logging.debug("no"); logging.warning("slow"); warnings.warn("old"); logging.error("lost")
raise ValueError("bad")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_process_logs_to_the_server_and_its_errors_also_to_stderr(form: str) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as log:
        command = [sys.executable, "-c", PROGRAM, form, str(write_end)]
        done = subprocess.run(
            command, pass_fds=(write_end,), stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
        os.close(write_end)
        log_lines = log.read().splitlines()
    assert done.returncode == 1 and "lost" in done.stderr and "bad" in done.stderr
    assert "begun" not in done.stderr and "slow" not in done.stderr  # they would fill the file that stderr goes to
    if form == "text":
        found = [line.split(" ", 2)[2] for line in log_lines]
        assert found == ["draft-0 INFO begun", "draft-0 WARNING slow", "draft-0 ERROR lost"]
        return
    objects = [json.loads(line) for line in log_lines]
    assert [one["level"] for one in objects] == ["info", "warning", "warning", "error", "critical"]
    assert "old" in objects[2]["message"] and "ValueError: bad" in objects[4]["message"]
    assert objects[4]["exception"].endswith("ValueError: bad")
