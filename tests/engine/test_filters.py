"""The numpy filters keep the same tokens as mlx-lm's."""

from __future__ import annotations

from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import steps
from outrider.engine.sampling import Sampler
from outrider.protocol.sampling import SamplingParams
from tests.logprobs import filtered_logprobs

FILTERS = {"top_p": 0.5, "min_p": 0.5, "top_k": 3}
OTHERS = {
    "max_tokens", "min_tokens", "temp", "repetition_penalty", "repetition_context_size", "presence_penalty",
    "presence_context_size", "frequency_penalty", "frequency_context_size", "logit_bias", "seed", "stop", "ignore_eos",
    "rule", "saguaro", "q_width", "grammar", "logprobs", "prompt_logprobs",
}  # fmt: skip


def test_every_sampling_parameter_that_excludes_tokens_is_one_of_the_filters() -> None:
    """A filter must be in three functions (for MLX, for numpy, and `Sampler.filters`) to be applied always."""
    unknown = {field.name for field in fields(SamplingParams)} - FILTERS.keys() - OTHERS
    assert not unknown, f"enter {unknown} in FILTERS above if they exclude tokens, else in OTHERS"
    logits = np.linspace(0, 3, 20, dtype=np.float32)[None]
    for name, value in FILTERS.items():
        params = SamplingParams(temp=0.7, seed=1, **{name: value})
        by_mlx = np.array(filtered_logprobs(mx.array(logits), None, params))
        by_numpy = steps.filter_logits(logits, params)
        assert Sampler(params, 20).filters and 1 < np.isfinite(by_mlx).sum() < 20, name
        assert (np.isfinite(by_mlx) == np.isfinite(by_numpy)).all(), name


@pytest.mark.parametrize("vocab_size", [8, 300, 4097])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.001},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.9, "min_p": 0.02, "top_k": 20},
    ],
)
def test_numpy_filters_keep_the_tokens_and_scores_of_mlx_lm(vocab_size: int, spread: float, changes: dict) -> None:
    logits = (np.random.default_rng(1).standard_normal((6, vocab_size)) * spread).astype(np.float32)
    params = SamplingParams(temp=0.7, seed=1, **changes)
    theirs, ours = np.array(filtered_logprobs(mx.array(logits), None, params)), steps.filter_logits(logits, params)
    for own, mlx in zip(ours, theirs, strict=True):
        kept = np.isfinite(mlx)
        # Tokens whose cumulative mass is within rounding of the border may fall on either side.
        assert np.count_nonzero(np.isfinite(own) != kept) <= (3 if vocab_size > 4000 else 0)
        kept &= np.isfinite(own)
        assert kept.any()
        np.testing.assert_allclose(np.ptp(own[kept] - mlx[kept]), 0.0, atol=1e-3)


def test_ties_at_the_border_of_top_p_are_all_kept() -> None:
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], dtype=np.float32))
    params = SamplingParams(temp=1.0, seed=1, top_p=0.5)
    assert np.isfinite(steps.filter_logits(logits, params)).all()
    assert np.isfinite(np.array(filtered_logprobs(mx.array(logits), None, params))).all()
