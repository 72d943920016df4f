"""The rounds that are reconstructed from a trace are those that ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.orchestrator.core.metrics import ORCHESTRATOR_TRACK, TARGET_TRACK, Trace
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Span
from tools.trace_rounds import TracedRound, read_rounds


def write(path: Path, *events: tuple[str, str, dict[str, Any]]) -> Path:
    trace = Trace(path)
    for at, (track, name, args) in enumerate(events):
        trace.add(track, name, Span(at * 1000, at * 1000 + 500), **args)
    trace.close()
    return path


def sent(number: int, name: str, *tokens: int) -> tuple[str, str, dict[str, Any]]:
    return ORCHESTRATOR_TRACK, name, {"round": number, "chain": len(tokens), "tokens": tokens}


def verified(number: int, accepted: int) -> tuple[str, str, dict[str, Any]]:
    return TARGET_TRACK, "verify", {"round": number, "accepted": accepted}


REQUEST = (
    verified(0, 0),
    sent(1, "hit", 11, 12),
    verified(1, 2),
    sent(2, "drafter", 14, 99),
    verified(2, 1),
    sent(3, "none"),
    verified(3, 0),
)
PROMPT, TEXT = (1, 2, 3), (10, 11, 12, 13, 14, 15, 16)
ROUNDS = [
    TracedRound(3, (), 0, 10, "start", True),
    TracedRound(4, (11, 12), 2, 13, "hit", False),
    TracedRound(7, (14, 99), 1, 15, "miss", None),  # one token was left: nothing was looked up
]


def test_rounds_and_lookups_are_read_from_a_trace(tmp_path: Path) -> None:
    assert read_rounds(write(tmp_path / "t.json", *REQUEST), [(PROMPT, TEXT)]) == [ROUNDS]


def test_consecutive_requests_of_a_trace_are_separated(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", *REQUEST, *REQUEST)
    assert read_rounds(trace, [(PROMPT, TEXT)] * 2) == [ROUNDS, ROUNDS]


def test_a_trace_of_other_texts_is_refused(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json", *REQUEST)
    with pytest.raises(InvalidRequest, match="has 1 requests; expected 2"):
        read_rounds(trace, [(PROMPT, TEXT)] * 2)
    with pytest.raises(InvalidRequest, match="continues after"):
        read_rounds(trace, [(PROMPT, TEXT[:3])])
    assert json.loads(trace.read_text())
