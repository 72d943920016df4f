"""The runtime for Core ML, with a fake of coremltools whose compiled models are run by the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.drafters.coreml import doctor, runtimes, selection, trial
from outrider.drafters.coreml.drafter import CoreMLDrafter
from outrider.drafters.coreml.runtimes import CoreMLRuntime, DeviceUnavailable, RuntimeFault, open_runtime
from outrider.drafters.coreml.trial import Trial
from outrider.drafters.drafter import make_drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams
from tests.coreml.conftest import GOOD, Converted
from tests.harness.mil_interpreter import NumpyRuntime
from tests.slots import open_draft_tree


class FakeCoreML:
    """A fake of coremltools: records what is compiled and loaded, predicts with the interpreter, raises `error`."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        fake = self

        class CompiledMLModel:
            def __init__(self, path: str, compute_units: Any, function_name: str, optimization_hints: Any) -> None:
                fake.fail()
                assert Path(path).is_dir() and path.endswith(".mlmodelc")
                fake.loaded.append((function_name, compute_units.name))
                self._runtime = NumpyRuntime(Path(path).parent)
                self._function = function_name

            def predict(self, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                fake.fail()
                fake.threads.add(threading.get_ident())
                assert all(array.dtype == np.float32 for array in data.values())
                return self._runtime.call(self._function, data)

        def compile_model(package: str, destination: str) -> str:
            fake.fail()
            fake.compiled.append(package)
            Path(destination).mkdir()
            return destination

        units = {name: SimpleNamespace(name=name) for name in runtimes.COMPUTE_UNITS}
        self.module = SimpleNamespace(
            models=SimpleNamespace(CompiledMLModel=CompiledMLModel, utils=SimpleNamespace(compile_model=compile_model)),
            ComputeUnit=units,
            SpecializationStrategy=SimpleNamespace(FastPrediction="fast"),
        )

    def fail(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, converted: Callable[..., Converted]) -> Iterator[FakeCoreML]:
    package = converted("llama").package  # made with the real coremltools
    stand_in = FakeCoreML()
    monkeypatch.setattr(runtimes, "import_coremltools", lambda part="": stand_in.module)
    monkeypatch.delenv(runtimes.STAND_IN_VARIABLE)
    monkeypatch.setattr(runtimes.sys, "platform", "darwin")
    monkeypatch.setattr(runtimes.platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    monkeypatch.setattr(runtimes, "os_build", lambda: "24F74")
    yield stand_in
    compiled = package.path / "compiled-24F74.mlmodelc"
    if compiled.is_dir():
        compiled.rmdir()


def test_drafter_on_core_ml_drafts_the_same_as_on_the_interpreter(
    fake: FakeCoreML, converted: Callable[..., Converted], text: list[int]
) -> None:
    made, drafted = converted("llama"), []
    for runtime in (CoreMLRuntime(made.package, "CPU_AND_NE"), NumpyRuntime(made.package.path)):
        drafter = CoreMLDrafter(made.package, runtime)
        tree = open_draft_tree(drafter, text[:70], SamplingParams(temp=1.0, seed=3))
        nodes = [tree.root]
        for _ in range(6):
            nodes += tree.feed(nodes[-1:], [None])
        drafted.append(tree.best(nodes))
    assert drafted[0] == drafted[1]
    assert fake.threads == {threading.get_ident()}
    assert fake.loaded == [(name, "CPU_AND_NE") for name in ("q1", "q8", "q16", "q32", "prefill64")]


def test_a_model_is_compiled_once(fake: FakeCoreML, converted: Callable[..., Converted]) -> None:
    package = converted("llama").package
    for _ in range(2):
        CoreMLRuntime(package, "CPU_ONLY", ["q1"])
    assert fake.compiled == [str(package.mlpackage)] and len(fake.loaded) == 2


def test_macos_14_has_no_core_ml_for_packages(
    fake: FakeCoreML, converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its Core ML supports neither functions nor states, so nothing is converted or tried, and MLX drafts."""
    monkeypatch.setattr(runtimes.platform, "mac_ver", lambda: ("14.7.6", ("", "", ""), "arm64"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made, messages = converted("llama"), list[str]()
    assert isinstance(selection.load_drafter(str(made.model_path), "mlx", messages.append), MlxDrafter)
    assert messages[0] == "drafting with MLX instead of Core ML: Core ML runs packages on macOS 15 or newer only"
    assert list(tmp_path.iterdir()) == [] and not fake.compiled
    with pytest.raises(DeviceUnavailable, match="macOS 15 or newer"):
        open_runtime(made.package, "CPU_ONLY")


def test_python_without_coremltools_drafts_with_mlx(
    fake: FakeCoreML, converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a Mac with Python 3.14, for which coremltools has no wheels, also with the default settings."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    monkeypatch.setattr(trial, "version", missing)
    monkeypatch.setattr(doctor, "os_build", lambda: "24F74")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    model, messages = str(converted("llama").model_path), list[str]()
    assert isinstance(make_drafter("mlx", model, messages.append), MlxDrafter) and "coremltools" not in "".join(
        messages
    )
    assert isinstance(make_drafter("coreml", model, messages.append), MlxDrafter)
    assert f"drafting with MLX instead of Core ML: {runtimes.NO_COREMLTOOLS_MESSAGE}" in messages
    assert doctor.list_placements(Path(model), try_now=True)[-1].note == runtimes.NO_COREMLTOOLS_MESSAGE


@pytest.mark.usefixtures("fake", "good_trials")
def test_results_are_in_the_cache_of_all_other_files_on_a_mac_too(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So tests that run on a Mac do not use the user's own folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial, "os_build", lambda: "24F74")
    trial.try_once(converted("llama").package, "CPU_ONLY", print)
    assert any((tmp_path / "outrider" / "coreml" / "trials").iterdir())


def test_core_ml_exceptions_become_one_line_errors(fake: FakeCoreML, converted: Callable[..., Converted]) -> None:
    package = converted("llama").package
    runtime = CoreMLRuntime(package, "CPU_AND_NE", ["q1"])
    shapes = package.layout.inputs(package.layout.functions[0])
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    fake.error = Exception("ANECCompile() failed (-14)\nmore of it")  # coremltools raises it bare
    with pytest.raises(RuntimeFault) as failed:
        runtime.call("q1", inputs)
    assert str(failed.value) == (
        "Core ML on CPU_AND_NE failed: ANECCompile() failed (-14); drafting is off for this request"
    )
    with pytest.raises(ModelError, match=r"Core ML can't load .* on CPU_ONLY: ANECCompile"):
        CoreMLRuntime(package, "CPU_ONLY")
    with pytest.raises(ModelError, match="Core ML can't compile"):
        CoreMLRuntime(converted("llama", context=64).package, "CPU_ONLY")


def test_without_core_ml_mlx_drafts(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv(runtimes.STAND_IN_VARIABLE)
    made, messages = converted("llama"), list[str]()
    with pytest.raises(ModelError, match=runtimes.MACOS_ONLY_MESSAGE):
        open_runtime(made.package, "CPU_AND_NE")
    assert isinstance(selection.load_drafter(str(made.model_path), "mlx", messages.append), MlxDrafter)
    assert runtimes.MACOS_ONLY_MESSAGE in messages[0] and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("good_trials")
def test_package_of_any_weights_is_used_and_a_model_is_converted_first(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made, messages = converted("llama", weights="int8"), list[str]()
    for weights, prefill in (("int8", str(made.package.path)), ("fp16", "mlx")):
        drafter = make_drafter("coreml", str(made.model_path), messages.append, prefill)
        assert isinstance(drafter, CoreMLDrafter) and drafter.backend == "coreml"
        assert drafter.note == messages[-1] == f"drafting with Core ML on CPU_AND_NE, {weights}, 2.25 ms a token"
        assert drafter.vocab_size == 512 and drafter.weight_bytes > 0 and drafter.parameters > 0
    assert drafter.context_length == 1024
    assert "converting the draft for Core ML: building" in messages


@pytest.mark.parametrize("works", [True, False])
def test_probe_decides_between_core_ml_and_mlx(
    fake: FakeCoreML,
    converted: Callable[..., Converted],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    works: bool,
) -> None:
    made, messages = converted("llama"), list[str]()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    row = GOOD if works else Trial("it crashed")
    monkeypatch.setattr(trial, "os_build", lambda: "24F74")
    monkeypatch.setattr(trial, "run_trial", lambda package, units: row)
    monkeypatch.setattr(selection, "cached_package", lambda checkpoint, tell: made.package)
    drafter = selection.load_drafter(str(made.model_path), "mlx", messages.append)
    assert isinstance(drafter, CoreMLDrafter if works else MlxDrafter) and drafter.note in messages
    assert (drafter.note == "drafting with Core ML on CPU_AND_NE, fp16, 2.25 ms a token") is works
    assert ("drafting with MLX instead of Core ML: Core ML does not help" in drafter.note) is not works
    if works:
        assert fake.loaded[0] == ("q1", "CPU_AND_NE")
        fake.error = Exception("out of memory")  # although its trial succeeded
        drafter = selection.load_drafter(str(made.model_path), "mlx", messages.append)
        assert isinstance(drafter, MlxDrafter) and "out of memory" in drafter.note
        assert drafter.left_out == (drafter.note,)


def test_a_trial_of_core_ml_compiles_loads_and_compares(fake: FakeCoreML, converted: Callable[..., Converted]) -> None:
    found = trial.measure_package(converted("llama").package, "CPU_ONLY", 20)
    assert found.agreement == 1.0 and found.distance < 0.02 and found.reason == ""
    assert len(fake.compiled) == 1 and [name for name, _ in fake.loaded] == ["q1", "q8", "q16", "q32", "prefill64"]
    assert found.engine_share is None  # the stand-in makes no plans
