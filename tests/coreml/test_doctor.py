"""What `outrider doctor` reports: one JSON object about the machine and the devices for a drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from outrider.drafters.coreml import doctor, trial
from outrider.drafters.coreml.doctor import Placement
from outrider.drafters.coreml.runtimes import MACOS_ONLY_MESSAGE, STAND_IN_VARIABLE
from outrider.drafters.coreml.trial import Trial
from outrider.orchestrator.cli import doctor as doctor_command
from outrider.orchestrator.cli import main
from outrider.orchestrator.pairing.model_files import TINY, TINY_TARGET
from outrider.protocol.errors import ModelError
from tests.coreml.conftest import GOOD, SIZES, Converted
from tools import coreml_survey as survey


def test_doctor_prints_the_machine_as_json(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama", **SIZES))
    done = subprocess.run(
        [sys.executable, "-m", "outrider.engine.models_only", "outrider.drafters.coreml.doctor", "--model", model],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["placements"] and found["model"] == model
    report = found["machine"]
    assert report["chip"] and report["cores"] >= 1 and report["memory_bytes"] > 2**30 and report["build"]
    assert set(report["libraries"]) == {"mlx", "mlx-lm", "coremltools", "numpy"}
    assert report["mlx_device"] in ("cpu", "gpu")


@pytest.mark.usefixtures("good_trials")
def test_doctor_lists_the_placements_of_a_draft(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("the list is another on a Mac")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    model = tiny_model("llama", **SIZES)
    before = {place.name: place for place in doctor.list_placements(model, try_now=False)}
    assert set(before) == {"ONNX Runtime on the CPU", "Core ML"} and "not converted yet" in before["Core ML"].note
    note = doctor._OWN_CORES_NOTE if mx.default_device().type == mx.gpu else "shares the CPU with the target"
    assert before["ONNX Runtime on the CPU"].note == note
    cpu = before["ONNX Runtime on the CPU"]
    assert cpu.usable and (cpu.one_ms or 0) > 0 and (cpu.eight_ms or 0) > 0
    for try_now in (True, False):  # a later report has the results of an earlier one
        places = doctor.list_placements(model, try_now)
        assert [place.name for place in places] == [
            "ONNX Runtime on the CPU",
            *(f"Core ML on {units}, fp16" for units in ("CPU_AND_NE", "CPU_ONLY")),
        ]
        assert all(place.usable and place.one_ms == 2.25 for place in places[1:])


def test_without_core_ml_nothing_is_converted(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv(STAND_IN_VARIABLE)
    _, last = doctor.list_placements(tiny_model("llama", **SIZES), try_now=True)
    assert (last.name, last.usable, last.note) == ("Core ML", False, MACOS_ONLY_MESSAGE)
    assert list(tmp_path.iterdir()) == []


def test_draft_unfit_for_core_ml_still_has_other_placements(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    places = doctor.list_placements(tiny_model("llama"), try_now=True)  # heads of 16
    assert places[-1].name == "Core ML" and "the Neural Engine needs a multiple" in places[-1].note and places[0].usable


def test_trial_results_become_placements(
    converted: Callable[..., Converted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = converted("llama")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "package_folder", lambda checkpoint: made.package.path)
    monkeypatch.setattr(doctor, "cached_package", lambda checkpoint, tell: made.package)
    untried = doctor.measure_core_ml(made.model_path, try_now=False)
    assert [place.usable for place in untried] == [False, False] and "not measured yet" in untried[0].note
    results = {"CPU_AND_NE": GOOD, "CPU_ONLY": Trial("it crashed")}
    monkeypatch.setattr(trial, "run_trial", lambda package, units: results[units])
    places = doctor.measure_core_ml(made.model_path, try_now=True)
    assert doctor.measure_core_ml(made.model_path, try_now=False) == places
    engine, cpu = places
    assert engine == Placement("Core ML on CPU_AND_NE, fp16", True, 2.25, 2.5, 0.97, doctor._COREML_NOTE)
    assert cpu == Placement("Core ML on CPU_ONLY, fp16", False, note="it crashed")


def test_missing_draft_is_a_one_line_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--model", "/nowhere"])
    assert doctor.main() == 3
    report = capsys.readouterr()
    assert report.out == "" and report.err.count("\n") == 1


def test_the_survey_has_a_row_for_every_kind_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "darwin":
        pytest.skip("a Mac has other units")
    monkeypatch.setattr(survey, "cached_package", lambda draft, tell, weights: weights)
    tried: list[tuple[str, str, int]] = []

    def try_out(weights: str, units: str, predictions: int) -> Trial:
        tried.append((weights, units, predictions))
        return GOOD if len(tried) % 2 else Trial("its trial was ended by signal 9 (Killed)")

    monkeypatch.setattr(survey.trial, "run_trial", try_out)
    rows = list(survey.run_survey(Path("draft"), 50))
    assert tried == [(weights, "CPU_ONLY", 50) for weights in ("fp16", "int8")]
    assert all(len(row) == len(survey.COLUMNS) for row in rows)
    assert [row[0] for row in rows] == ["fp16", "int8"]
    assert rows[1][-1] == "its trial was ended by signal 9 (Killed)" and rows[1][2] == "NO"


def test_default_devices_are_left_as_they_were(tiny_model: Callable[..., Path]) -> None:
    before = mx.default_device()
    doctor.measure_device(tiny_model("llama", **SIZES), mx.cpu)
    assert mx.default_device() == before


def test_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reported, start = list[Any](), subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *line, **how: reported.append(start(*line, **how)) or reported[-1])
    assert main(["doctor", "--draft-model", TINY]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("chip ") and ": milliseconds for 1 token, and for 8 tokens at once" in printed
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: reported[-1])
    assert main(["doctor", "--draft-model", TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(reported[-1].stdout)


@pytest.mark.parametrize(
    ("platform", "library", "shown"),
    [
        ("darwin", None, "Accelerate"),
        ("linux", "libopenblas.so.0", "libopenblas.so.0"),
        ("linux", None, "MLX's own, which is slow"),
    ],
)
def test_command_names_the_blas_that_workers_use(
    monkeypatch: pytest.MonkeyPatch, platform: str, library: str | None, shown: str
) -> None:
    monkeypatch.setattr(doctor_command.system, "needs_openblas", lambda: platform == "linux")
    monkeypatch.setattr(doctor_command.system, "find_openblas", lambda: library)
    report = {"machine": doctor.inspect_machine(), "model": "draft", "placements": []}
    assert f"BLAS         {shown}" in doctor_command._format_report(report)


def test_command_looks_for_the_draft_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the report takes minutes with --probe"))
    assert main(["doctor", "--draft-model", "/no/such"]) == ModelError.exit_code


def test_default_model_without_a_draft_needs_one_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_MODEL", str(TINY_TARGET))
    assert main(["doctor"]) == 2
    assert f"no draft model comes with {TINY_TARGET}; expected --draft-model" in capsys.readouterr().err
