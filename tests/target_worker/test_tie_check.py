"""A difference by rounding is a tie, at every temperature and with every filter; any other is a mismatch.

`OUTRIDER_FUZZ=20000` tests 50 times as many positions as the default, 400.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine.sampling import Sampler
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.certificate import is_tie, judge

POSITIONS = int(os.environ.get("OUTRIDER_FUZZ", "400")) // 20
VOCABULARY = 64
TEMPERATURES = (0.0, 0.1, 0.3, 0.7, 1.0, 2.0)
FORMATS = (mx.bfloat16, mx.float16, mx.float32)
SHAPES = {
    "plain": SamplingParams(seed=5),
    "top-p": SamplingParams(seed=5, top_p=0.9),
    "all filters": SamplingParams(seed=5, top_p=0.95, min_p=0.02, top_k=12),
    "penalties": SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.01),
}


def random_positions(dtype: mx.Dtype, seed: int) -> Iterator[tuple[mx.array, mx.array, list[int]]]:
    """Yields logits, the same with each moved by at most one step of the format, and the tokens before them."""
    random = np.random.default_rng(seed)
    for position in range(4, 4 + POSITIONS):
        size = random.choice([4.0, 12.0, 40.0])  # where steps are small and where they are large
        logits = mx.array((random.standard_normal((1, VOCABULARY)) * size / 4 + size / 2).astype(np.float32))
        logits = logits.astype(dtype)
        exact = np.array(logits.astype(mx.float32))
        step = float(mx.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(exact) + 1e-9))
        moved = exact + step * random.integers(-1, 2, exact.shape)
        yield logits, mx.array(moved.astype(np.float32)).astype(dtype), random.integers(0, 64, position).tolist()


def chosen(logits: mx.array, tokens: list[int], sampler: Sampler) -> int:
    scores = sampler.scores(logits, [len(tokens)], [tokens] if sampler.needs_history else None)
    return int(mx.argmax(scores[0]).item())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_step_in_every_logit_is_a_tie(dtype, shape):
    ties = 0
    for number, temp in enumerate(TEMPERATURES):
        params = replace(SHAPES[shape], temp=temp)
        sampler = Sampler(params, VOCABULARY, normalised=temp == 0)
        for logits, moved, tokens in random_positions(dtype, number):
            found = judge(logits, tokens, sampler, chosen(moved, tokens, sampler))
            assert found is None or is_tie(found), (temp, found)
            ties += found is not None
    assert ties or dtype != mx.bfloat16, "no rounding step changed a choice"


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_token_chosen_from_other_logits_is_a_mismatch(dtype, shape):
    """It is a possible token, but its score is rarely near the best one's."""
    wrong = caught = 0
    for number, temp in enumerate(TEMPERATURES):
        params = replace(SHAPES[shape], temp=temp)
        sampler = Sampler(params, VOCABULARY, normalised=temp == 0)
        for logits, _, tokens in random_positions(dtype, number):
            token = chosen(logits[:, ::-1], tokens, sampler)
            found = judge(logits, tokens, sampler, token)
            wrong += found is not None
            caught += found is not None and not is_tie(found)
    assert caught > 0.95 * wrong > 0


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize(("gap", "tied"), [(0.2, True), (0.4, False)])
def test_margin_is_measured_in_logits_at_every_temperature(temp, gap, tied):
    """Near 20 a step of bfloat16 is 0.125. Rounding moves each of two logits by up to one, before the division by T."""
    params = SamplingParams(temp=temp, seed=1)
    sampler = Sampler(params, VOCABULARY, normalised=temp == 0)
    noise = np.array(sampler.noise_at(3)) if temp else np.zeros(VOCABULARY)
    logits = np.full(VOCABULARY, 0.0)
    logits[7] = 20.0
    logits[9] = 20.0 - gap + temp * (noise[7] - noise[9])
    found = judge(mx.array(logits[None].astype(np.float32)).astype(mx.bfloat16), [1, 2, 3], sampler, 9)
    assert found is not None and is_tie(found) is tied
    assert found.margin == pytest.approx(gap, abs=0.07)


def test_token_far_outside_a_filter_has_no_margin():
    for params in (SamplingParams(temp=0.1, seed=1, top_k=1), SamplingParams(temp=0.1, seed=1, top_p=0.5)):
        found = judge(mx.arange(8.0)[None], [1, 2], Sampler(params, 8), 3)
        assert found is not None and found.margin is None and not is_tie(found)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_token_that_the_model_excludes_has_no_margin(temp: float) -> None:
    """Such as by an output layer for part of the vocabulary, which gives all other tokens a logit of -inf."""
    logits = mx.where(mx.arange(8) == 3, -mx.inf, mx.arange(8.0))[None]
    found = judge(logits, [1, 2], Sampler(SamplingParams(temp=temp, seed=1), 8), 3)
    assert found is not None and found.margin is None and not is_tie(found)
