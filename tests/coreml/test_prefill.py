"""A prompt that the package reads and hands to MLX continues as if MLX had read it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.coreml import selection, trial
from outrider.drafters.coreml.drafter import PackageReader
from outrider.drafters.coreml.runtimes import (
    MACOS_ONLY_MESSAGE,
    STAND_IN_VARIABLE,
    Inputs,
    Outputs,
    RuntimeFault,
)
from outrider.drafters.coreml.selection import Packages
from outrider.drafters.coreml.trial import TrialResult, TrialStore
from outrider.drafters.drafter import make_drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, ReadingFault
from outrider.engine.loading import load
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import SamplingParams
from tests.coreml.conftest import GOOD, SIZES, VOCAB, Converted
from tests.harness.mil_interpreter import NumpyRuntime
from tests.slots import open_draft_tree

Figure = Callable[[str, float], None]
STEPS = 40
NOISE = {"fp32": 1e-4, "fp16": 0.1}
KINDS = [
    ("llama", "fp32", 2),
    ("llama", "fp32", 1),
    ("llama", "fp16", 2),
    ("qwen3", "fp16", 2),
]
kinds = pytest.mark.parametrize(("family", "weights", "layers"), KINDS)


def reader_of(made: Converted, least: int = 1) -> PackageReader:
    return PackageReader(made.package, NumpyRuntime(made.package.path), least)


@kinds
def test_mlx_continues_from_the_keys_and_values_of_the_package(
    converted: Callable[..., Converted],
    text: list[int],
    family: str,
    weights: str,
    layers: int,
    figure: Figure,
) -> None:
    """mlx-lm's own caches take the keys and values as they are."""
    made = converted(family, weights=weights, num_hidden_layers=layers)
    model, prompt, rest = made.mlx(), text[:150], text[150 : 150 + STEPS]
    exact = made.mlx_logits(text)[150 : 150 + STEPS]
    caches, counts = make_prompt_cache(model), list[int]()
    for read in reader_of(made)(prompt):
        counts.append(read[0][0].shape[2])
        for cache, (keys, values) in zip(caches, read, strict=True):
            cache.update_and_fetch(keys, values)
    assert counts == [64, 64, 22] and all(cache.offset == 150 for cache in caches)
    found = np.array([np.array(model(mx.array([[token]]), cache=caches)[0, -1]) for token in rest])
    noise = NOISE[weights]
    figure(f"prefill handed to MLX, {weights}: largest logit error over {STEPS} steps", np.abs(found - exact).max())
    assert np.abs(found - exact).max() <= noise < exact.std() / 10
    second, best = np.partition(exact, -2, axis=-1)[:, -2:].T
    missed = found.argmax(-1) != exact.argmax(-1)
    assert ((best - second)[missed] <= noise).all()


@pytest.mark.parametrize("form", [JointKVRows, DenseKVRows])
@pytest.mark.parametrize(("weights", "prompt_length"), [("fp32", 150), ("fp16", 150), ("fp16", 340)])
def test_tree_grows_on_a_prompt_read_by_the_package(
    converted: Callable[..., Converted], text: list[int], form: type[DenseKVRows], weights: str, prompt_length: int
) -> None:
    """With ONNX Runtime and with MLX. The model reads what exceeds the package's context of 256 tokens."""
    made = converted("llama", weights=weights, max_position_embeddings=1024)
    model, prompt = load(made.model_path), [*text, *text][:prompt_length]
    columns = form(model if form is JointKVRows else replace(model, cpu=None))
    columns.reader = reader_of(made)
    tree = Tree(columns, Sampler(SamplingParams(), VOCAB, normalised=False), 1024)
    assert [tree.read(prompt), tree.read(prompt[64:])] == [64, 64]
    tree.read_all(prompt[128:])
    assert columns.read == min(prompt_length - 1, 256)
    exact, path, tip = made.mlx(), list(prompt), tree.root
    for token in text[:8]:
        expected = np.array(exact(mx.array([path]))[0, -1])
        gaps = {candidate.token: candidate.gap for candidate in tree.candidates([tip], VOCAB)[0]}
        found = np.array([gaps[i] for i in range(VOCAB)])
        assert np.abs(found - (expected.max() - expected)).max() <= 2 * NOISE[weights]
        (tip,) = tree.feed([tip], [token])
        path.append(token)


def test_keys_are_converted_to_the_number_format_of_the_model(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    made = converted("llama")
    model = load(made.model_path)
    model.model.set_dtype(mx.bfloat16)
    kv_rows = DenseKVRows(replace(model, cpu=None))
    (read,) = reader_of(made)(text[:10])
    kv_rows.adopt(0, read)
    assert {cache.keys.dtype for cache in kv_rows.rows._layers if cache.keys is not None} == {mx.bfloat16}


def test_short_prompts_are_left_to_the_model(converted: Callable[..., Converted], text: list[int]) -> None:
    reader = reader_of(converted("llama"), least=100)
    read = [sum(piece[0][0].shape[2] for piece in reader((text * 2)[:count])) for count in (0, 1, 99, 100, 200, 300)]
    assert read == [0, 0, 0, 100, 200, 256]


class FailingRuntime:
    """The interpreter, which returns NaN or infinity, or raises, after its first call."""

    name, compile_seconds = "the failing device", 0.0

    def __init__(self, made: Converted, how: str) -> None:
        self._inner, self._how, self.calls = NumpyRuntime(made.package.path), how, 0

    def call(self, function: str, inputs: Inputs) -> Outputs:
        self.calls += 1
        outputs = self._inner.call(function, inputs)
        if self.calls > 1:
            if self._how == "dies":
                raise RuntimeFault("the failing device is gone")
            outputs["v_new"][0, 0, 3, 0] = np.inf if self._how == "says infinity" else np.nan
        return outputs


@pytest.mark.parametrize("how", ["dies", "says NaN", "says infinity"])
def test_model_reads_on_when_the_device_fails(
    converted: Callable[..., Converted], text: list[int], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = converted("llama", weights="fp32")
    reader = PackageReader(made.package, FailingRuntime(made, how), 1)
    drafter = MlxDrafter(load(made.model_path), reader)
    tree, alone = (open_draft_tree(d, text[:150], SamplingParams()) for d in (drafter, MlxDrafter(drafter.model)))
    found, expected = (t.candidates([t.root], VOCAB)[0] for t in (tree, alone))
    assert [c.token for c in found[:5]] == [c.token for c in expected[:5]]
    assert max(abs(a.gap - b.gap) for a, b in zip(found, expected, strict=True)) < 1e-3
    (record,) = [r.getMessage() for r in caplog.records if "the model reads" in r.getMessage()]
    expected_reason = "is gone" if how == "dies" else "returned keys that are NaN or infinite"
    assert (
        expected_reason in record
        and record.endswith("the model reads the prompt from token 64 on")
        and "\n" not in record
    )
    with pytest.raises(ReadingFault):
        list(reader(text[:10]))


def test_interrupted_reading_returns_its_cache(converted: Callable[..., Converted], text: list[int]) -> None:
    reader = reader_of(converted("llama"))
    pieces = reader(text)
    next(pieces)
    pieces.close()
    assert len(reader._host._spare) == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_trials: None) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def script_measurements(monkeypatch: pytest.MonkeyPatch, *ms: tuple[float, float]) -> list[str]:
    """Replaces measurements: `ms` are the times of MLX and of the package at 64, 128, ... tokens; if empty, they fail.

    Returns a list to which each measurement adds its units.
    """
    measured: list[str] = []

    def run(package: object, units: str, *arguments: str) -> dict[str, Any]:
        measured.append(units)
        if not ms:
            raise RuntimeFault("its trial was ended by SIGKILL")
        lengths = [64 << i for i in range(len(ms))]
        mlx, own = ([pair[i] for pair in ms] for i in (0, 1))
        mine = {"units": units, "mlx": trial.mlx_and_device()}
        return {**mine, "lengths": lengths, "mlx_ms": mlx, "package_ms": own}

    monkeypatch.setattr(trial, "_run_program", run)
    return measured


@pytest.fixture
def packages(converted: Callable[..., Converted], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """The packages of a model, of which the first one has been converted."""
    made = converted("llama", max_position_embeddings=256)
    found = Packages(made.model_path)
    shutil.copytree(made.package.path, found._directory(found.variants[0]))
    return found


@pytest.mark.parametrize(
    ("ms", "least"),
    [
        ([(1, 9), (2, 9), (9, 3)], 256),
        ([(9, 1), (9, 2), (9, 3)], 64),
        ([(9, 1), (1, 9), (9, 3)], 256),
        ([(9, 1), (9, 1), (9, 8.9)], None),
        ([(1, 2)], None),
    ],
)
def test_package_reads_prompts_from_the_length_where_faster(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, ms: Sequence[tuple[float, float]], least: int | None
) -> None:
    measured, model = script_measurements(monkeypatch, *ms), str(packages.checkpoint)
    assert selection.load_prompt_reader(model, "auto", print) == ""
    for _ in range(2):
        found = selection.get_prompt_times(packages, print)
        assert found.min_tokens == least and ("MLX reads" in found.sentence) == (least is None)
        assert "\n" not in found.sentence
        reader = selection.load_prompt_reader(model, "auto", print)
        assert (None if isinstance(reader, str) else reader.min_tokens) == least
    assert measured == ["CPU_AND_NE"]


@pytest.mark.parametrize("change", ["mlx_and_device", "os_build"])
def test_prompt_times_are_valid_for_one_version_of_mlx_and_macos(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    measured = script_measurements(monkeypatch, (9, 1))
    assert selection.get_prompt_times(packages, print).min_tokens == 64
    monkeypatch.setattr(trial, change, lambda: "another")
    assert selection.load_prompt_reader(str(packages.checkpoint), "auto", print) == ""
    assert selection.get_prompt_times(packages, print).min_tokens == 64 and measured == ["CPU_AND_NE"] * 2


def test_prompt_times_of_a_rebuilt_package_are_not_used(
    packages: Packages, converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch
) -> None:
    script_measurements(monkeypatch, (9, 1))
    row = TrialResult(
        packages.variants[0], "another key", "CPU_ONLY", GOOD, prompts=trial.time_prompts(None, "CPU_ONLY", None)
    )
    TrialStore(packages.source_hash).add(row)
    assert selection.load_prompt_reader(str(packages.checkpoint), "auto", print) == ""


def test_failed_measurement_leaves_prompts_to_mlx(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = script_measurements(monkeypatch)
    for _ in range(2):
        found = selection.get_prompt_times(packages, print)
        assert found.min_tokens is None and found.sentence == "prompts are read by MLX: its trial was ended by SIGKILL"
    assert measured == ["CPU_AND_NE"]


def test_prompt_times_are_measured_in_a_separate_process(converted: Callable[..., Converted]) -> None:
    made = converted("llama")
    found = trial.time_prompts(made.package, "CPU_ONLY", made.model_path)
    assert found.lengths == [64, 128, 256] and found.reason == ""
    assert min(*found.mlx_ms, *found.package_ms) > 0


def test_drafter_uses_the_package_only_where_measured_faster(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, text: list[int]
) -> None:
    model, messages = str(packages.checkpoint), list[str]()
    assert selection.load_prompt_reader(model, "auto", messages.append) == "" and messages == []
    script_measurements(monkeypatch, (9, 20), (20, 9))
    assert selection.get_prompt_times(packages, messages.append).min_tokens == 128
    reader = selection.load_prompt_reader(model, "auto", messages.append)
    assert not isinstance(reader, str) and reader.min_tokens == 128 and not list(reader(text[:127]))
    assert messages[-1].startswith("prompts of 128 tokens and more are read by the reference interpreter")
    drafter = make_drafter("mlx", model, messages.append)
    assert isinstance(drafter, MlxDrafter) and drafter.note == reader.note
    tree = open_draft_tree(drafter, text[:150], SamplingParams())
    alone = open_draft_tree(make_drafter("mlx", model, messages.append, "mlx"), text[:150], SamplingParams())
    assert tree.best([tree.root]) == alone.best([alone.root])


def test_mlx_reads_prompts_without_core_ml(
    converted: Callable[..., Converted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.delenv(STAND_IN_VARIABLE)
    model, why = str(converted("llama").model_path), f"prompts are read by MLX: {MACOS_ONLY_MESSAGE}"
    assert selection.load_prompt_reader(model, "coreml", print) == why
    for prefill, left_out in (("coreml", (why,)), ("mlx", ()), ("auto", ())):
        drafter = make_drafter("mlx", model, print, prefill)
        assert isinstance(drafter, MlxDrafter) and drafter.left_out == left_out


@pytest.mark.parametrize("prefill", ["coreml", "package"])
def test_package_reads_prompts_when_requested(converted: Callable[..., Converted], cache: Path, prefill: str) -> None:
    made, messages = converted("llama"), list[str]()
    setting = str(made.package.path) if prefill == "package" else prefill
    reader = selection.load_prompt_reader(str(made.model_path), setting, messages.append)
    assert not isinstance(reader, str) and reader.min_tokens == 1 and "reference interpreter" in reader.note
    assert ("converting" in messages[0]) == (prefill == "coreml")


def test_invalid_settings_are_one_line_errors(
    converted: Callable[..., Converted], tiny_model: Callable[..., Path], cache: Path
) -> None:
    made = converted("llama")
    other = tiny_model("llama", seed=5, **SIZES)
    with pytest.raises(ModelError, match=r"was made from llama-.* other weights than .* has") as refused:
        selection.load_prompt_reader(str(other), str(made.package.path), print)
    assert "\n" not in str(refused.value)
    for setting in ("often", "~no-such-user/package"):
        with pytest.raises(InvalidRequest, match=f"draft prefill is '{setting}'; expected auto, mlx, coreml or"):
            selection.load_prompt_reader(str(made.model_path), setting, print)
    with pytest.raises(ModelError, match="the Neural Engine needs a multiple"):
        selection.load_prompt_reader(str(tiny_model("llama")), "coreml", print)
