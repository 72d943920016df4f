"""A trial of a package: its criteria, and failures that it survives. Core ML's units are simulated."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.drafters.coreml import runtimes, trial
from outrider.drafters.coreml.runtimes import DeviceUnavailable
from outrider.drafters.coreml.trial import Trial
from tests.coreml.conftest import GOOD, Converted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"agreement": 0.85}, "it agreed with the reference on 85% of tokens; expected 90%"),
        ({"distance": 0.06}, "its distributions are 0.060 from the reference; expected at most 0.05"),
    ],
)
def test_fault_of_a_trial_names_the_failed_criterion(change: dict[str, Any], reason: str) -> None:
    assert dataclasses.replace(GOOD, **change).reason == reason


def test_trial_runs_in_a_separate_process(converted: Callable[..., Converted], tmp_path: Path) -> None:
    """A file in the user's folder that is named like a package of Outrider's is not imported."""
    package = converted("llama").package
    result = tmp_path / "trial.json"
    (tmp_path / "outrider.py").write_text("raise SystemExit('the wrong one')")
    command = trial.trial_command(package, "CPU_ONLY", 4, result)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout == done.stderr == ""
    found = Trial(**json.loads(result.read_text()))
    assert found.agreement == 1.0 and found.distance < 0.02 and found.reason == ""
    assert set(found.ms) == {"q1", "q8", "q16", "q32", "prefill64"} and all(ms > 0 for ms in found.ms.values())


def test_missing_core_ml_is_a_reason(converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.delenv(runtimes.STAND_IN_VARIABLE)
    row = trial.run_trial(converted("llama").package, "CPU_AND_NE")
    assert row.reason == f"its trial failed: {runtimes.MACOS_ONLY_MESSAGE}" and row.failure


def test_unit_with_wrong_logits_fails_its_trial(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is MLX's, so a package with other numbers fails."""
    made, other = converted("llama").package, converted("qwen2").package
    assert trial.measure_package(made, "CPU_ONLY", 1).reason == ""
    swapped = dataclasses.replace(made, expected=other.expected)
    assert "it agreed with the reference on" in trial.measure_package(swapped, "CPU_ONLY", 1).reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its trial was ended by signal 9 (Killed"),
        ("import os; os.kill(os.getpid(), 24)", "its trial was ended by signal 24 ("),
        ("import sys; sys.exit(7)", "its trial failed with exit code 7"),
        ("import sys; sys.exit('first\\nlast words')", "its trial failed: last words"),
        ("import time; time.sleep(60)", "its trial was still running after 3 seconds"),
    ],
)
def test_trial_that_dies_or_hangs_has_a_reason(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    monkeypatch.setattr(trial, "trial_command", lambda *arguments: [sys.executable, "-c", program])
    if "sleep" in program:
        monkeypatch.setattr(trial, "_TIMEOUT_SECONDS", 3.0)
    row = trial.run_trial(converted("llama").package, "CPU_AND_NE")
    assert row.reason.startswith(reason) and row.failure


class FakeComputePlan:
    """A fake of coremltools' modules for devices and compute plans, which return values or raise."""

    def __init__(self, placed: dict[str, list[tuple[str, str | None]]] | None, devices: list[str]) -> None:
        self._kinds = {name: type(name, (), {}) for name in ("MLCPUComputeDevice", "MLNeuralEngineComputeDevice")}
        self._placed, self._devices = placed, devices

    def module(self, name: str = "") -> Any:
        if name.endswith("compute_device"):
            found = [self._kinds[device]() for device in self._devices]
            return SimpleNamespace(
                **self._kinds, MLComputeDevice=SimpleNamespace(get_all_compute_devices=lambda: self._answer(found))
            )
        plan = SimpleNamespace(load_from_path=self._load)
        return SimpleNamespace(MLComputePlan=plan, ComputeUnit={"CPU_AND_NE": 1})

    def _answer(self, answer: Any) -> Any:
        if not self._devices:
            raise Exception("no word")  # coremltools raises it bare
        return answer

    def _load(self, path: str, units: Any) -> Any:
        if self._placed is None:
            raise Exception("no plan\nmore of it")
        functions = {
            name: SimpleNamespace(block=SimpleNamespace(operations=[SimpleNamespace(operator_name=kind, on=device)
                                                                    for kind, device in placed]))
            for name, placed in self._placed.items()
        }  # fmt: skip

        def usage(operation: Any) -> Any:
            device = self._kinds.get(operation.on or "")
            return None if device is None else SimpleNamespace(preferred_compute_device=device())

        return SimpleNamespace(
            model_structure=SimpleNamespace(program=SimpleNamespace(functions=functions)),
            get_compute_device_usage_for_mlprogram_operation=usage,
        )


def use_plan(monkeypatch: pytest.MonkeyPatch, plan: FakeComputePlan) -> None:
    monkeypatch.setattr(runtimes, "import_coremltools", plan.module)
    monkeypatch.setattr(runtimes, "ensure_compiled", lambda package: Path("model.mlmodelc"))


def test_engine_share_counts_only_operations_that_compute(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cpu = "MLNeuralEngineComputeDevice", "MLCPUComputeDevice"
    operations = [("ios18.conv", engine), ("ios16.constexpr_blockwise_shift_scale", cpu), ("const", cpu),
                  ("ios18.softmax", cpu), ("ios18.matmul", engine), ("add", None)]  # fmt: skip
    package = converted("llama").package
    use_plan(monkeypatch, FakeComputePlan({"q1": operations}, [cpu]))
    assert runtimes.engine_share(package, "CPU_AND_NE") == 0.6667
    for empty in ({"q1": [("add", None)]}, {}):
        use_plan(monkeypatch, FakeComputePlan(empty, [cpu]))
        assert runtimes.engine_share(package, "CPU_AND_NE") is None
    assert not runtimes.has_neural_engine()


def test_trial_continues_without_a_compute_plan_or_a_device_list(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = converted("llama").package
    use_plan(monkeypatch, FakeComputePlan(None, []))
    assert runtimes.engine_share(package, "CPU_AND_NE") is None and runtimes.has_neural_engine()
    use_plan(monkeypatch, FakeComputePlan(None, ["MLCPUComputeDevice"]))
    assert trial.measure_package(package, "CPU_ONLY", 1).reason == ""
    with pytest.raises(DeviceUnavailable, match="can't use a Neural Engine"):
        trial.measure_package(package, "CPU_AND_NE", 1)
    use_plan(monkeypatch, FakeComputePlan(None, ["MLCPUComputeDevice", "MLNeuralEngineComputeDevice"]))
    assert runtimes.has_neural_engine()


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
