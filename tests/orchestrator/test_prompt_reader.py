"""What tune prints about prompts on a Mac: the measuring process's sentence, or why there is none."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from outrider.orchestrator.machine import spawn
from outrider.orchestrator.machine.spawn import measured


def answering(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(spawn.sys, "platform", "darwin")
    monkeypatch.setattr(spawn.subprocess, "run", run)
    return asked


def test_the_measurement_is_asked_about_the_draft_and_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, 0, json.dumps({"least": 128, "sentence": "from 128 tokens on", "times": None}))
    assert measured("models/draft") == "from 128 tokens on"
    assert asked[0][-3:] == ["outrider.drafters.coreml.prompts", "--model", "models/draft"]


def test_a_measurement_that_fails_leaves_prompts_with_mlx_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 3, "", "warming up\nthere is no room on the disk\n")
    assert measured("d") == "MLX reads prompts: there is no room on the disk"


def test_elsewhere_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, 0, "{}")
    monkeypatch.setattr(spawn.sys, "platform", "linux")
    assert measured("d") is None and not asked
