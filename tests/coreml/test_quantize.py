"""Quantised weights are bit for bit equal in the package, in MLX and by coremltools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from outrider.drafters.coreml import weights
from outrider.drafters.coreml.converter import convert
from outrider.drafters.coreml.layout import Options
from outrider.drafters.coreml.package import open_package
from outrider.drafters.coreml.weights import GROUP_SIZE, QuantizedMatrix
from outrider.protocol.errors import ModelError
from tests.coreml.conftest import Converted
from tests.harness import mil_interpreter, mil_program
from tests.harness.mil_program import Constant, SavedModel, SavedOperation


def matrix(seed: int, scale: float, rows: int = 96, columns: int = 192, offset: float = 0.0) -> NDArray[np.float16]:
    draws = np.random.default_rng(seed)
    return (draws.standard_normal((rows, columns)) * scale + offset * scale).astype(np.float16)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), exponent=st.integers(-24, 10), offset=st.sampled_from([0.0, 0.0, 3.0, -8.0]),
    bits=st.sampled_from([4, 8]),
)  # fmt: skip
def test_mlx_and_core_ml_hold_the_same_bits(seed: int, exponent: int, offset: float, bits: int) -> None:
    dense = matrix(seed, 2.0**exponent, rows=8, columns=128, offset=offset)
    form = weights.quantize_int4(dense) if bits == 4 else weights.quantize_int8(dense)
    in_mlx = np.array(mx.dequantize(*weights.to_mlx(form), group_size=GROUP_SIZE, bits=bits))
    assert in_mlx.dtype == np.float16
    assert (in_mlx == form.values).all()
    assert (in_mlx == _decompressed(form)).all()


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-4])
def test_quantisation_error_stays_within_the_step(scale: float) -> None:
    dense = matrix(1, scale)
    for form, most in ((weights.quantize_int8(dense), 0.0095), (weights.quantize_int4(dense), 0.11)):
        error = form.values.astype(np.float64) - dense
        assert error.std() <= most * dense.astype(np.float64).std()


def test_extreme_values_are_kept() -> None:
    dense = matrix(2, 1.0)
    dense[0, 0], dense[1, 1] = 30.0, -30.0
    for form in (weights.quantize_int8(dense), weights.quantize_int4(dense)):
        assert abs(form.values[0, 0] - 30) < 1.2 and abs(form.values[1, 1] + 30) < 1.2


def test_zeros_stay_zeros() -> None:
    dense = np.zeros((4, 64), np.float16)
    assert not weights.quantize_int8(dense).values.any() and not weights.quantize_int4(dense).values.any()


def test_a_width_that_does_not_divide_into_groups_is_refused() -> None:
    with pytest.raises(ModelError, match="q_proj has 96 columns; int4 needs a multiple of 64"):
        weights.quantize_int4(matrix(0, 1.0, columns=96), "q_proj")


@pytest.mark.parametrize(("weights", "tied"), [("int8", True), ("int4", False)], ids=["int8 tied", "int4 untied"])
def test_package_on_disk_equals_its_mlx_twin_bit_for_bit(
    converted: Callable[..., Converted], weights: str, tied: bool
) -> None:
    made = converted("qwen2", weights=weights, tie_word_embeddings=tied)
    assert made.twin is not None
    twin, _ = load_model(made.twin)
    expected = [
        np.array(_dequantized(module))
        for name, module in twin.named_modules()
        if "scales" in module and (tied or "embed" not in name)
    ]
    found = _matrices_on_disk(mil_program.read(made.package.path))
    assert len(found) == len(expected) == 15  # seven a layer, and the head
    for values in found:
        assert values.dtype == np.float16
        assert any(values.shape == other.shape and (values == other).all() for other in expected)
    head = _dequantized(twin.model.embed_tokens) if tied else twin.model.embed_tokens.weight
    assert (np.asarray(made.package.embedding) == np.array(head)).all()


def test_a_checkpoint_of_four_bits_keeps_its_levels(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Snapping moves a scale by less than a hundredth, so no weight moves by more than a fraction of a step."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 512, "num_hidden_layers": 1}
    source = tiny_model("llama", **sizes)
    model, config = load_model(source)
    nn.quantize(model, group_size=GROUP_SIZE, bits=4)
    packed = tmp_path / "packed"
    packed.mkdir()
    mx.save_safetensors(str(packed / "model.safetensors"), dict(_flat(model)))
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4}
    (packed / "config.json").write_text(json.dumps(config))
    convert(packed, tmp_path / "package", Options(weights="int4", context=64))
    before = [np.array(_dequantized(module)) for _, module in model.named_modules() if "scales" in module]
    for values in _matrices_on_disk(mil_program.read(open_package(tmp_path / "package").path)):
        close = [other for other in before if other.shape == values.shape and np.abs(other - values).max() < 0.02]
        assert len(close) == 1
        step = np.abs(close[0]).max() / 8
        assert np.abs(close[0] - values).max() < 0.1 * step


def _decompressed(form: QuantizedMatrix) -> NDArray[np.float16]:
    """coremltools' own decompression."""
    from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_blockwise_shift_scale

    return np.asarray(constexpr_blockwise_shift_scale.decompress(form.data, form.scale, form.zero))


def _matrices_on_disk(model: SavedModel) -> list[NDArray[np.float16]]:
    """Every quantised matrix of the first function, expanded as the interpreter does."""
    found = []
    for operation in model.functions[model.default_function].operations:
        if operation.kind == "constexpr_blockwise_shift_scale":
            expanded = mil_interpreter.blockwise_shift_scale(**_parts(model, operation)).astype(np.float16)
            found.append(expanded.reshape(expanded.shape[:2]))
    return found


def _parts(model: SavedModel, operation: SavedOperation) -> dict[str, NDArray[np.generic]]:
    parts = {}
    for name, (binding,) in operation.arguments.items():
        assert isinstance(binding, Constant)
        parts[name] = model.value(binding)
    return parts


def _dequantized(module: nn.Module) -> mx.array:
    wide: mx.array = mx.dequantize(
        module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits
    )
    return wide


def _flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    return list(tree_flatten(model.parameters()))
