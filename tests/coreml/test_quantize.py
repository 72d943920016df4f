"""Quantised weights are bit for bit equal in the package, in MLX and by coremltools."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from outrider.drafters.coreml import weights
from outrider.drafters.coreml.weights import GROUP_SIZE, QuantizedMatrix
from tests.coreml.conftest import Converted
from tests.harness import mil_interpreter, mil_program
from tests.harness.mil_program import Constant, SavedModel, SavedOperation


def matrix(seed: int, scale: float, rows: int = 96, columns: int = 192, offset: float = 0.0) -> NDArray[np.float16]:
    draws = np.random.default_rng(seed)
    return (draws.standard_normal((rows, columns)) * scale + offset * scale).astype(np.float16)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), exponent=st.integers(-24, 10), offset=st.sampled_from([0.0, 0.0, 3.0, -8.0])
)  # fmt: skip
def test_mlx_and_core_ml_hold_the_same_bits(seed: int, exponent: int, offset: float) -> None:
    dense = matrix(seed, 2.0**exponent, rows=8, columns=128, offset=offset)
    form = weights.quantize_int8(dense)
    in_mlx = np.array(mx.dequantize(*weights.to_mlx(form), group_size=GROUP_SIZE, bits=8))
    assert in_mlx.dtype == np.float16
    assert (in_mlx == form.values).all()
    assert (in_mlx == _decompressed(form)).all()


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-4])
def test_quantisation_error_stays_within_the_step(scale: float) -> None:
    dense = matrix(1, scale)
    error = weights.quantize_int8(dense).values.astype(np.float64) - dense
    assert error.std() <= 0.0095 * dense.astype(np.float64).std()


def test_extreme_values_are_kept() -> None:
    dense = matrix(2, 1.0)
    dense[0, 0], dense[1, 1] = 30.0, -30.0
    values = weights.quantize_int8(dense).values
    assert abs(values[0, 0] - 30) < 0.2 and abs(values[1, 1] + 30) < 0.2


def test_zeros_stay_zeros() -> None:
    dense = np.zeros((4, 64), np.float16)
    assert not weights.quantize_int8(dense).values.any()


@pytest.mark.parametrize("tied", [True, False])
def test_package_on_disk_equals_its_mlx_twin_bit_for_bit(converted: Callable[..., Converted], tied: bool) -> None:
    made = converted("qwen2", weights="int8", tie_word_embeddings=tied)
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


def _decompressed(form: QuantizedMatrix) -> NDArray[np.float16]:
    """coremltools' own decompression."""
    from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_blockwise_shift_scale

    return np.asarray(constexpr_blockwise_shift_scale.decompress(form.data, form.scale, None))


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
