"""Quantised weights: their error, and that the package and coremltools hold the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from outrider.drafters.coreml import weights
from outrider.drafters.coreml.weights import Checkpoint, QuantizedMatrix
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
def test_values_are_those_that_coremltools_decompresses(seed: int, exponent: int, offset: float) -> None:
    form = weights.quantize_int8(matrix(seed, 2.0**exponent, rows=8, columns=128, offset=offset))
    assert form.values.dtype == np.float16
    assert (form.values == _decompressed(form)).all()


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-4])
def test_quantisation_error_stays_within_the_step(scale: float) -> None:
    dense = matrix(1, scale)
    error = weights.quantize_int8(dense).values.astype(np.float64) - dense
    assert error.std() <= 0.0075 * dense.astype(np.float64).std()


def test_extreme_values_are_kept() -> None:
    dense = matrix(2, 1.0)
    dense[0, 0], dense[1, 1] = 30.0, -30.0
    values = weights.quantize_int8(dense).values
    assert abs(values[0, 0] - 30) < 0.2 and abs(values[1, 1] + 30) < 0.2


def test_zeros_stay_zeros() -> None:
    dense = np.zeros((4, 64), np.float16)
    assert not weights.quantize_int8(dense).values.any()


@pytest.mark.parametrize("tied", [True, False])
def test_package_on_disk_holds_the_quantised_weights(converted: Callable[..., Converted], tied: bool) -> None:
    made = converted("qwen2", weights="int8", tie_word_embeddings=tied)
    own = Checkpoint(made.model_path, "int8").read(lambda done, total: None)
    found = _matrices_on_disk(mil_program.read(made.package.path))
    assert len(found) == len(own.matrices) == 15  # seven a layer, and the head
    for values in found:
        assert any(values.shape == form.data.shape and (values == form.values).all() for form in own.matrices.values())
    head = own.matrices["lm_head"].values if tied else _embedding(made.model_path)
    assert (np.asarray(made.package.embedding) == head).all()


def _embedding(model: Path) -> NDArray[np.float16]:
    embedding: NDArray[np.float16] = np.array(load_model(model)[0].model.embed_tokens.weight.astype(mx.float16))
    return embedding


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
