"""Another memory layout of the weights changes no value and, with the reference BLAS, no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from outrider.engine import loading


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_next"])
def test_laid_out_weights_keep_their_values_and_logits(tiny_model: Callable[..., Path], family: str) -> None:
    (plain, _), (laid, _) = (load_model(tiny_model(family)) for _ in range(2))
    assert loading.transpose_weights(laid, 0)
    ours, theirs = dict(tree_flatten(laid.parameters())), dict(tree_flatten(plain.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)
    text = mx.array([[5, 6, 7, 8, 9]])
    if loading.has_openblas():
        assert mx.allclose(laid(text), plain(text), atol=1e-3)  # it adds in another order
    else:
        assert mx.array_equal(laid(text), plain(text))


def test_tied_head_multiplies_by_the_transposed_copy(tiny_model: Callable[..., Path]) -> None:
    tied, _ = load_model(tiny_model("llama"))
    untied, _ = load_model(tiny_model("mistral"))
    for model in (tied, untied):
        loading.transpose_weights(model, 0)
    assert type(tied.model.embed_tokens) is loading.HeadEmbedding
    assert type(untied.model.embed_tokens) is nn.Embedding


def test_large_weights_are_not_laid_out_with_openblas(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(tiny_model("llama"))
    monkeypatch.setattr(loading, "has_openblas", lambda: True)
    assert not loading.transpose_weights(model, 2**30)
    assert loading.transpose_weights(model, 2**20)
