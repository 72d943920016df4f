"""The first-use probe: what it gates, what it survives, what it remembers. Others play Core ML's units here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_worker.coreml import probe, trial
from draft_worker.coreml.package import Package
from draft_worker.coreml.probe import Verdict
from draft_worker.coreml.trial import Trial
from tests.coreml.conftest import Bench

MS = {"q1": 2.25, "q8": 2.5, "q16": 3.0, "q32": 4.0, "prefill64": 6.0}
GOOD = Trial("CPU_AND_NE", 1.5, 300, 1.0, 0.001, MS, {"q1": 0.97})


def outcomes(**by_units: Verdict) -> tuple[Callable[[Package, str], Verdict], list[str]]:
    """A way to try units that answers as told, and the list of what was tried."""
    tried: list[str] = []

    def attempt(package: Package, units: str) -> Verdict:
        tried.append(units)
        return by_units[units]

    return attempt, tried


def bad(units: str) -> Verdict:
    return Verdict(units, None, "its trial was ended by SIGKILL")


def good(units: str) -> Verdict:
    return Verdict(units, dataclasses.replace(GOOD, units=units))


def test_the_neural_engine_is_tried_first_and_often_alone(bench: Callable[..., Bench], tmp_path: Path) -> None:
    attempt, tried = outcomes(CPU_AND_NE=good("CPU_AND_NE"))
    choice = probe.choose(bench("llama").package, tmp_path, attempt)
    assert choice.units == "CPU_AND_NE" and tried == ["CPU_AND_NE"]
    assert choice.sentence == "drafting with Core ML on CPU_AND_NE, 2.25 ms a token"


def test_it_falls_back_with_a_sentence(bench: Callable[..., Bench], tmp_path: Path) -> None:
    attempt, tried = outcomes(CPU_AND_NE=bad("CPU_AND_NE"), CPU_ONLY=good("CPU_ONLY"))
    choice = probe.choose(bench("llama").package, tmp_path, attempt)
    assert choice.units == "CPU_ONLY" and tried == ["CPU_AND_NE", "CPU_ONLY"]
    assert choice.sentence.endswith("on CPU_ONLY, 2.25 ms a token (CPU_AND_NE: its trial was ended by SIGKILL)")


def test_without_a_good_unit_mlx_drafts(bench: Callable[..., Bench], tmp_path: Path) -> None:
    attempt, _ = outcomes(CPU_AND_NE=bad("CPU_AND_NE"), CPU_ONLY=bad("CPU_ONLY"))
    choice = probe.choose(bench("llama").package, tmp_path, attempt)
    assert choice.units is None and "drafting with MLX instead" in choice.sentence
    assert "CPU_AND_NE: its trial was ended by SIGKILL; CPU_ONLY:" in choice.sentence


def test_verdicts_are_remembered_by_package_and_system(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = bench("llama").package
    attempt, tried = outcomes(CPU_AND_NE=bad("CPU_AND_NE"), CPU_ONLY=good("CPU_ONLY"))
    first = probe.choose(package, tmp_path, attempt)
    tried.clear()
    assert probe.choose(package, tmp_path, attempt) == first and tried == []
    assert probe.recall(package, tmp_path) == {"CPU_AND_NE": bad("CPU_AND_NE"), "CPU_ONLY": good("CPU_ONLY")}
    probe.choose(bench("qwen2").package, tmp_path, attempt)
    assert tried == ["CPU_AND_NE", "CPU_ONLY"]
    tried.clear()
    monkeypatch.setattr(probe, "os_build", lambda: "99Z1")
    probe.choose(package, tmp_path, attempt)
    assert tried == ["CPU_AND_NE", "CPU_ONLY"]


def test_a_memory_that_can_not_be_read_is_made_anew(bench: Callable[..., Bench], tmp_path: Path) -> None:
    package = bench("llama").package
    attempt, tried = outcomes(CPU_AND_NE=good("CPU_AND_NE"))
    probe.choose(package, tmp_path, attempt)
    (file,) = tmp_path.iterdir()
    for text in ("{", "[]", '{"CPU_AND_NE": {"units": "CPU_AND_NE"}}', '{"CPU_AND_NE": {"trial": {"x": 1}}}'):
        file.write_text(text)
        tried.clear()
        assert probe.choose(package, tmp_path, attempt).units == "CPU_AND_NE" and tried == ["CPU_AND_NE"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"agreement": 0.85}, "it agreed with the reference on 85% of tokens; expected 90%"),
        ({"distance": 0.06}, "its distributions are 0.060 from the reference; expected at most 0.05"),
        ({"agreement": float("nan")}, "it agreed with the reference on nan% of tokens; expected 90%"),
        ({"distance": float("nan")}, "its distributions are nan from the reference; expected at most 0.05"),
    ],
)
def test_the_gate(change: dict[str, Any], reason: str) -> None:
    verdict = probe.judge(dataclasses.replace(GOOD, **change))
    assert verdict.reason == reason and verdict.good == (not reason)


def test_a_trial_in_its_own_process(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """The interpreter tried against itself stands for a device."""
    package = bench("llama").package
    result = tmp_path / "trial.json"
    done = subprocess.run(
        [sys.executable, "-m", "draft_worker.coreml.trial", "--package", str(package.path), "--units", "REFERENCE",
         "--predictions", "4", "--result", str(result)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == done.stderr == ""
    found = Trial(**json.loads(result.read_text()))
    assert found.agreement == 1.0 and found.distance == 0.0 and found.predictions == 4
    assert set(found.ms) == {"q1", "q8", "q16", "q32", "prefill64"} and all(ms > 0 for ms in found.ms.values())


def test_a_device_that_refuses_is_told_in_its_own_words(bench: Callable[..., Bench]) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    verdict = probe.try_out(bench("llama").package, "CPU_AND_NE")
    assert verdict.reason.startswith("its trial failed: Core ML runs on macOS only") and verdict.trial is None


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its trial was ended by SIGKILL"),
        ("import os; os.abort()", "its trial was ended by SIGABRT"),
        ("import sys; sys.exit(7)", "its trial failed with exit code 7"),
        ("import time; time.sleep(60)", "its trial was still running after 2 seconds"),
    ],
)
def test_a_trial_may_die_or_hang(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    kept = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return kept([sys.executable, "-c", program], **options)

    monkeypatch.setattr(probe.subprocess, "run", run)
    monkeypatch.setattr(probe, "_TIMEOUT_SECONDS", 2.0)
    assert probe.try_out(bench("llama").package, "CPU_AND_NE").reason == reason


def test_agreement_counts_misses_but_not_near_ties() -> None:
    expected = np.array([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [0.0, 5.0, 4.99], [0.0, 5.0, 4.99]], np.float32)
    found = expected.copy()
    assert trial.agreement(found, expected) == 1.0
    found[2] = [0.0, 4.99, 5.0]  # a near-tie the other way round
    assert trial.agreement(found, expected) == 1.0
    found[3] = [6.0, 5.0, 4.99]  # a near-tie of two others
    assert trial.agreement(found, expected) == 0.75
    found[0] = [0.0, 2.9, 3.0]
    assert trial.agreement(found, expected) == 0.5
