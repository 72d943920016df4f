"""A prompt read by the package and handed to MLX's caches goes on as if MLX had read it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from draft_worker.coreml.prefill import prefill_into
from draft_worker.drafter import DrafterFault
from tests.coreml.conftest import Bench

STEPS = 40


@pytest.mark.parametrize(
    ("family", "mode", "weights", "layers"),
    [
        ("llama", "stateless", "fp32", 2),
        ("llama", "stateless", "fp32", 1),
        ("llama", "stateless", "fp16", 2),
        ("qwen2", "hybrid", "fp16", 2),
        ("qwen3", "onehot", "fp16", 2),
        ("llama3", "stateless", "fp16", 2),
    ],
)
def test_mlx_goes_on_from_it(
    bench: Callable[..., Bench], text: list[int], family: str, mode: str, weights: str, layers: int
) -> None:
    made = bench(family, mode=mode, weights=weights, num_hidden_layers=layers)
    model, prompt, rest = made.mlx(), text[:150], text[150 : 150 + STEPS]
    exact = made.mlx_logits(text)[150 : 150 + STEPS]
    caches, seen = make_prompt_cache(model), list[int]()
    prefill_into(made.host(), caches, prompt, mx.float32, lambda done, total: seen.append(done))
    assert seen == [64, 128, 150]
    assert all(cache.offset == 150 and cache.keys.dtype == mx.float32 for cache in caches)
    found = np.array([np.array(model(mx.array([[token]]), cache=caches)[0, -1]) for token in rest])
    noise = 1e-4 if weights == "fp32" else 0.1
    assert np.abs(found - exact).max() <= noise < exact.std() / 10
    second, best = np.partition(exact, -2, axis=-1)[:, -2:].T
    missed = found.argmax(-1) != exact.argmax(-1)
    assert ((best - second)[missed] <= noise).all()


def test_what_does_not_fit_is_refused(bench: Callable[..., Bench]) -> None:
    made = bench("llama")
    caches = make_prompt_cache(made.mlx())
    for tokens in ([], [1] * 257):
        with pytest.raises(DrafterFault, match="context takes 1 to 256"):
            prefill_into(made.host(), caches, tokens)
    with pytest.raises(DrafterFault, match="1 caches; the package's model has 2 layers"):
        prefill_into(made.host(), caches[:1], [1, 2])
