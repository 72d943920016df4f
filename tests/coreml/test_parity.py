"""A package equals the model it was converted from, for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.coreml.conftest import Converted

Figure = Callable[[str, float], None]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama3", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]
NAMES = ["llama", "llama-untied", "llama-biased", "llama3-rope", "qwen2", "qwen3"]


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=NAMES)
def test_float32_package_equals_the_model(
    converted: Callable[..., Converted], text: list[int], family: str, config: dict[str, Any], figure: Figure
) -> None:
    made, text = converted(family, weights="fp32", **config), text[:120]
    found, expected = made.logits(text), made.mlx_logits(text)
    figure("fp32: tokens that differ, of 120", (found.argmax(-1) != expected.argmax(-1)).sum())
    figure("fp32: largest logit error", np.abs(found - expected).max())
    assert expected.std() > 1  # with flat logits the test would show nothing
    assert np.abs(found - expected).max() <= 1e-4
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_float16_package_errs_about_as_much_as_mlx_in_float16(
    converted: Callable[..., Converted], text: list[int], family: str, figure: Figure
) -> None:
    made, text = converted(family), text[:80]
    found, exact, mlx_float16 = made.logits(text), made.mlx_logits(text), made.mlx_logits(text, mx.float16)
    figure("fp16: error over MLX float16's", np.abs(found - exact).max() / np.abs(mlx_float16 - exact).max())
    figure("fp16: tokens that differ, of 80, near-ties all", (found.argmax(-1) != exact.argmax(-1)).sum())
    _check_float16(found, exact, mlx_float16)


@pytest.mark.parametrize("tied", [True, False])
def test_quantised_package_equals_mlx_with_its_weights(
    converted: Callable[..., Converted], text: list[int], tied: bool, figure: Figure
) -> None:
    made, text = converted("qwen2", weights="int8", tie_word_embeddings=tied), text[:80]
    found, exact, mlx_float16 = made.logits(text), made.mlx_logits(text), made.mlx_logits(text, mx.float16)
    figure("int8: error over MLX float16's", np.abs(found - exact).max() / np.abs(mlx_float16 - exact).max())
    _check_float16(found, exact, mlx_float16)


def _check_float16(found: NDArray[np.float32], exact: NDArray[np.float32], mlx_float16: NDArray[np.float32]) -> None:
    """Checks that the error is at most three times MLX's in float16, and that choices differ in near ties only."""
    allowed = 3 * np.abs(mlx_float16 - exact).max()
    second, best = np.partition(exact, -2, axis=-1)[:, -2:].T
    missed = found.argmax(-1) != exact.argmax(-1)
    assert np.abs(found - exact).max() <= allowed < exact.std() / 4
    assert ((best - second)[missed] <= allowed).all()
    assert missed.mean() <= 0.05
