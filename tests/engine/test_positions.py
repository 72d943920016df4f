"""A wrapped rope gives each token of one row its own position, and equals the plain rope otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model

from outrider.engine.flat import TokenRope, patch_ropes
from outrider.engine.hidden_states import add_mixin
from outrider.engine.ort.layers import check_rope
from outrider.protocol.errors import ModelError

POSITIONS = [7, 3, 3, 900, 0, 55]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}

ROPES: dict[str, Callable[[], nn.Module]] = {
    "default": lambda: initialize_rope(16, 10000.0, False),
    "half of the width": lambda: initialize_rope(8, 10000.0, False),
    "linear": lambda: initialize_rope(16, 10000.0, False, {"rope_type": "linear", "factor": 4.0}),
    "llama3": lambda: initialize_rope(16, 10000.0, False, LLAMA3, 512),
    "yarn": lambda: initialize_rope(16, 10000.0, False, YARN, 512),
    "longrope": lambda: initialize_rope(16, 10000.0, False, LONG, 512),
    "proportional": lambda: initialize_rope(16, 10000.0, False, PROPORTIONAL, 512),
    "traditional": lambda: initialize_rope(16, 10000.0, True),
}


def by_token(rope: nn.Module, x: mx.array) -> mx.array:
    return mx.concatenate([rope(x[:, :, i : i + 1], offset=p) for i, p in enumerate(POSITIONS)], axis=2)


def extended(rope: nn.Module) -> nn.Module:
    add_mixin(rope, TokenRope)
    return rope


@pytest.mark.parametrize("name", sorted(ROPES))
def test_each_token_of_a_row_is_rotated_by_its_own_position(name: str) -> None:
    rope, wrapped = ROPES[name](), extended(ROPES[name]())
    x = mx.random.normal((1, 3, len(POSITIONS), 16))
    got = wrapped(x, offset=mx.array(POSITIONS))
    np.testing.assert_allclose(np.array(got), np.array(by_token(rope, x)), atol=3e-4)
    assert np.abs(np.array(got) - np.array(rope(x, offset=7))).max() > 0.1


@pytest.mark.parametrize("name", sorted(ROPES))
def test_onnx_runtime_gets_only_ropes_that_rotate_halves_of_a_head(name: str) -> None:
    if name in ("traditional", "half of the width"):
        with pytest.raises(ModelError, match="tabulated"):
            check_rope(ROPES[name](), 16)
    else:
        check_rope(ROPES[name](), 16)


def test_other_offsets_are_passed_to_the_wrapped_rope() -> None:
    rope, wrapped = ROPES["default"](), extended(ROPES["default"]())
    x = mx.random.normal((3, 2, 3, 16))
    for offset in (0, 5, mx.array(5), mx.array([4, 9, 1])):
        assert mx.array_equal(wrapped(x, offset=offset), rope(x, offset=offset))
    assert mx.array_equal(wrapped(x), rope(x))


def test_install_does_not_change_plain_decoding(tiny_model: Callable[..., Path]) -> None:
    for family in ("llama3", "phi3", "gemma3_text"):
        logits = []
        for wrap in (False, True):
            model, _ = load_model(tiny_model(family))
            if wrap:
                patch_ropes(model)
                patch_ropes(model)
            cache = [KVCache() for _ in model.layers]
            model(mx.array([[5, 6, 7]]), cache=cache)
            logits.append(model(mx.array([[8, 9]]), cache=cache))
        assert mx.array_equal(*logits)
