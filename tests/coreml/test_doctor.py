"""What `outrider doctor` renders: one JSON object about the machine and the devices for a drafter."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from outrider.drafters.coreml import doctor, prompts, selection
from outrider.drafters.coreml.converter import Options
from outrider.drafters.coreml.package import Manifest, Package
from outrider.drafters.coreml.selection import OfCheckpoint, ProbeVerdict, Tried, Verdicts
from outrider.drafters.coreml.trial import Ending
from tests.coreml.conftest import GOOD, SIZES, Bench
from tools import coreml_survey as survey


def test_the_machine_in_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outrider.drafters.coreml.doctor"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["placements"] == [] and found["model"] is None
    told = found["machine"]
    assert told["chip"] and told["cores"] >= 1 and told["memory_bytes"] > 2**30 and told["build"]
    assert set(told["libraries"]) == {"mlx", "mlx-lm", "coremltools", "numpy"}
    assert told["mlx_device"] in ("cpu", "gpu") and told["blas"]["gflops"] > 0


@pytest.mark.parametrize(
    ("mapped", "system", "library"),
    [
        ("", "darwin", "Accelerate"),
        ("7f0 r-xp /usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so\n", "linux", "OpenBLAS"),
        ("7f0 r-xp /venv/numpy.libs/libscipy_openblas64_-8fb3d286.so\n", "linux", "reference"),
        ("7f0 r-xp /venv/mlx/lib/libblas.so.3\n", "linux", "reference"),
    ],
)
def test_the_blas_is_told_from_what_is_loaded(mapped: str, system: str, library: str) -> None:
    assert doctor.blas_of(mapped, system)[0] == library


def test_placements_of_a_draft(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("the list is another on a Mac")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = '{"units": "REFERENCE", "lengths": [64], "mlx_ms": [1], "package_ms": [2]}'
    monkeypatch.setattr(prompts, "run_measurement", lambda *asked: Ending(times))
    model = tiny_model("llama", **SIZES)
    before = {place.name: place for place in doctor.examine(str(model), try_now=False).placements}
    assert set(before) == {"ONNX Runtime on the CPU", "Core ML"} and "not converted yet" in before["Core ML"].note
    note = doctor._OWN_CORES if mx.default_device().type == mx.gpu else "shares the CPU with the target"
    assert before["ONNX Runtime on the CPU"].note == note
    after = {place.name: place for place in doctor.examine(str(model), try_now=True).placements}
    assert set(after) == {
        "ONNX Runtime on the CPU", "Core ML on the Neural Engine", "reference interpreter", "prompts of a draft on MLX"
    }  # fmt: skip
    assert "MLX reads prompts" in after["prompts of a draft on MLX"].note
    for name in ("ONNX Runtime on the CPU", "reference interpreter"):
        assert after[name].usable and (after[name].one_ms or 0) > 0 and (after[name].eight_ms or 0) > 0
    assert not after["Core ML on the Neural Engine"].usable
    assert after["reference interpreter"].note == "for tests only"


def test_a_draft_that_core_ml_can_not_have_still_has_its_other_places(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = doctor.examine(str(tiny_model("llama")), try_now=True).placements  # heads of 16
    assert places[-1].name == "Core ML" and "off the Neural Engine's grid" in places[-1].note and places[0].usable


def test_verdicts_become_placements(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = bench("llama").package
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    monkeypatch.setattr(selection, "os_build", lambda: "24F74")
    monkeypatch.setattr(doctor.converter, "root", lambda: tmp_path)
    packages = OfCheckpoint.of(bench("llama").model_path, 256)
    assert [place.usable for place in doctor.on_core_ml(packages, try_now=False)] == [False, False]
    kept = Verdicts(doctor.converter.probes(), packages.source_hash)
    slower = dataclasses.replace(GOOD, ms={name: 2 * ms for name, ms in GOOD.ms.items()})
    kept.add(Tried.of(bench("llama", mode="hybrid").package, ProbeVerdict("CPU_AND_NE", slower)))
    kept.add(Tried.of(package, ProbeVerdict("CPU_AND_NE", GOOD)))
    kept.add(Tried.of(package, ProbeVerdict("CPU_ONLY", None, "it crashed")))
    engine, other, cpu = doctor.on_core_ml(packages, try_now=False)
    assert (engine.usable, engine.one_ms, engine.eight_ms, engine.engine_share) == (True, 2.25, 2.5, 0.97)
    assert [place.name for place in (engine, other)] == [
        "Core ML on CPU_AND_NE, stateless fp16", "Core ML on CPU_AND_NE, hybrid fp16"
    ]  # fmt: skip
    assert not cpu.usable and cpu.note == "it crashed"


def test_a_draft_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--model", "/nowhere"])
    assert doctor.main() == 3
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1


def test_the_survey_has_a_row_for_every_mode_and_kind(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("a Mac has other units")
    made, wanted = bench("llama"), list[Options]()

    def package_of(model: Path, options: Options, folder: Path) -> Package:
        assert (model, folder) == (made.model_path, tmp_path)
        wanted.append(options)
        return dataclasses.replace(made.package, manifest=_as(made.package.manifest, options))

    monkeypatch.setattr(survey.converter, "package_of", package_of)
    tried: list[tuple[str, int]] = []

    def try_out(package: object, units: str, predictions: int) -> ProbeVerdict:
        tried.append((units, predictions))
        return selection.judge(GOOD) if len(tried) % 2 else ProbeVerdict(units, None, "its trial was ended by SIGKILL")

    monkeypatch.setattr(survey.selection, "try_out", try_out)
    rows = [survey.cells(row) for row in survey.survey(made.model_path, 50, tmp_path)]
    assert len(rows) == 9 and tried == [("REFERENCE", 50)] * 9
    assert all(len(row) == len(survey.COLUMNS) for row in rows)
    modes, kinds = ("stateless", "hybrid", "onehot"), ("fp16", "int8", "int4")
    assert {row[:2] for row in rows} == {(mode, kind) for mode in modes for kind in kinds}
    assert [(options.mode, options.weights) for options in wanted] == [row[:2] for row in rows]
    assert rows[1][-1] == "its trial was ended by SIGKILL" and rows[1][3] == "NO"


def _as(manifest: Manifest, options: Options) -> Manifest:
    layout = dataclasses.replace(manifest.layout, mode=options.mode, weights=options.weights)
    return dataclasses.replace(manifest, layout=layout)


def test_default_devices_are_left_as_they_were(tiny_model: Callable[..., Path]) -> None:
    before = mx.default_device()
    doctor.on_device(tiny_model("llama", **SIZES), mx.cpu)
    assert mx.default_device() == before
