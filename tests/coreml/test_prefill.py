"""A prompt that the package reads and hands to MLX continues as if MLX had read it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.coreml import selection
from outrider.drafters.coreml.drafter import PackageReader
from outrider.drafters.coreml.runtimes import (
    MACOS_ONLY_MESSAGE,
    STAND_IN_VARIABLE,
    Inputs,
    Outputs,
    RuntimeFault,
)
from outrider.drafters.drafter import make_drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, ReadingFault
from outrider.engine.loading import load
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import SamplingParams
from tests.coreml.conftest import SIZES, VOCAB, Converted
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


def reader_of(made: Converted) -> PackageReader:
    return PackageReader(made.package, NumpyRuntime(made.package.path))


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


class FailingRuntime:
    """The interpreter, which returns NaN or infinity, or raises, after its first call."""

    name = "the failing device"

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
    reader = PackageReader(made.package, FailingRuntime(made, how))
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


def test_mlx_reads_prompts_without_core_ml(
    converted: Callable[..., Converted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "darwin":
        pytest.skip("on a Mac Core ML is there")
    monkeypatch.delenv(STAND_IN_VARIABLE)
    model, why = str(converted("llama").model_path), f"prompts are read by MLX: {MACOS_ONLY_MESSAGE}"
    assert selection.load_prompt_reader(model, "coreml", print) == why
    for prefill, left_out in (("coreml", (why,)), ("mlx", ())):
        drafter = make_drafter("mlx", model, print, prefill)
        assert isinstance(drafter, MlxDrafter) and drafter.left_out == left_out


@pytest.mark.parametrize("prefill", ["coreml", "package"])
def test_package_reads_prompts_when_requested(converted: Callable[..., Converted], cache: Path, prefill: str) -> None:
    made, messages = converted("llama"), list[str]()
    setting = str(made.package.path) if prefill == "package" else prefill
    reader = selection.load_prompt_reader(str(made.model_path), setting, messages.append)
    assert not isinstance(reader, str) and "reference interpreter" in reader.note
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
        with pytest.raises(InvalidRequest, match=f"draft prefill is '{setting}'; expected mlx, coreml or"):
            selection.load_prompt_reader(str(made.model_path), setting, print)
    with pytest.raises(ModelError, match="the Neural Engine needs a multiple"):
        selection.load_prompt_reader(str(tiny_model("llama")), "coreml", print)
