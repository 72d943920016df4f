"""What tune prints about prompts on a Mac: the measuring process's sentence, or why there is none."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from outrider.orchestrator.machine import spawn
from outrider.orchestrator.machine.spawn import measure_prompt_reading


def answering(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(spawn.sys, "platform", "darwin")
    monkeypatch.setattr(spawn.subprocess, "run", run)
    return asked


def test_measurement_runs_for_the_draft_and_returns_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, 0, json.dumps({"least": 128, "sentence": "from 128 tokens on", "times": None}))
    assert measure_prompt_reading("models/draft") == "from 128 tokens on"
    assert asked[0][-4:] == ["outrider.drafters.coreml.doctor", "--model", "models/draft", "--prompts"]


def test_failed_measurement_falls_back_to_mlx_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 3, "", "warming up\nthere is no room on the disk\n")
    assert measure_prompt_reading("d") == "MLX reads prompts: there is no room on the disk"


def test_measurement_does_not_run_outside_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, 0, "{}")
    monkeypatch.setattr(spawn.sys, "platform", "linux")
    assert measure_prompt_reading("d") is None and not asked
