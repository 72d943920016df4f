"""A trace is bounded, and on disk while the server runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.orchestrator.core import metrics
from outrider.orchestrator.core.metrics import Trace
from outrider.protocol.messages import Span


def test_trace_drops_events_past_its_limit_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "MAX_TRACE_EVENTS", 5)
    trace = Trace(tmp_path / "trace.json")
    for number in range(20):
        trace.add("target", f"verify {number}", Span(number, number))
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [f"verify {number}" for number in range(5)]
    assert caplog.text.count("later events are left out") == 1


def test_trace_is_written_while_the_server_runs(tmp_path: Path) -> None:
    path, events = tmp_path / "trace.json", 20_000
    trace = Trace(path)
    for number in range(events):
        trace.add("target", f"verify {number}", Span(number, number))
    assert path.stat().st_size > 50 * events  # little is left to write at the end
    trace.close()
    assert len(json.loads(path.read_text())["traceEvents"]) == events + 2  # the names of a process and its track
