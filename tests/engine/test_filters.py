"""The numpy filters keep the same tokens as mlx-lm's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import steps
from outrider.protocol.sampling import SamplingParams
from tests.warp import warp


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
    theirs, ours = np.array(warp(mx.array(logits), None, params)), steps.filter_logits(logits, params)
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
    assert np.isfinite(np.array(warp(mx.array(logits), None, params))).all()
