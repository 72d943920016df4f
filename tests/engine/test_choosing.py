"""`Sampler.choose`, the fast path by numpy, returns the token with the best exact score, or None if it can't be sure.

`Sampler.scores` computes the exact steps.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine.noise import MAX_NOISE, MIN_NOISE, gumbel
from outrider.engine.sampling import Sampler
from outrider.protocol.sampling import SamplingParams
from tests.pairwise import matrix

WIDTH = 49_152
POSITIONS = [100, 101, 102, 4000]


def logits(seed: int, spread: float, width: int = WIDTH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(len(POSITIONS), width)) * spread).astype(np.float32)


@matrix(temp=[0.0, 0.3, 0.8, 1.0, 2.0], spread=[0.0, 0.5, 2.0, 4.0, 30.0], seed=range(6))
def test_the_choice_is_the_argmax_of_the_scores(temp: float, spread: float, seed: int) -> None:
    sampler = Sampler(SamplingParams(temp=temp, seed=seed), WIDTH)
    rows = logits(seed, spread)
    expected = mx.argmax(sampler.scores(mx.array(rows), POSITIONS), axis=-1).tolist()
    chosen = sampler.choose(rows, POSITIONS)
    if temp == 0 and spread == 0:
        assert chosen is None  # all are equal
    else:
        assert chosen == expected


def test_unlikely_token_is_chosen_when_its_noise_exceeds_the_gap() -> None:
    """A token is found even if only the largest possible noise lifts it above the best one."""
    sampler = Sampler(SamplingParams(temp=1.0, seed=3), WIDTH)
    position = 226  # of the first 400 the one with the greatest noise
    noise = gumbel(np, 3, [position], WIDTH)[0]
    token, other = int(noise.argmax()), int(noise.argmin())
    gap = noise[token] - noise[other]
    assert gap > 14
    rows = np.full((1, WIDTH), -100, np.float32)
    rows[0, other] = 0
    for below, expected in ((0.01, token), (-0.01, other)):
        rows[0, token] = below - gap
        assert sampler.choose(rows, [position]) == [expected]


def test_noise_stays_within_its_bounds() -> None:
    smallest = np.float32(2.0**-25)  # the smallest u and 1 - u, see `noise`
    assert 17.3 < -np.log(smallest) < MAX_NOISE and MIN_NOISE < -np.log(-np.log(smallest)) < -2.8
    noise = gumbel(np, 0, range(64), 4096)
    assert noise.min() > MIN_NOISE and noise.max() < MAX_NOISE


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_near_ties_are_left_to_the_exact_steps(temp: float) -> None:
    sampler = Sampler(SamplingParams(temp=temp, seed=1), WIDTH)
    noise = gumbel(np, 1, [7], WIDTH)[0] * np.float32(temp)
    rows = np.full((1, WIDTH), -200, np.float32)
    rows[0, 5], rows[0, 9] = 10 - noise[5], 10 - noise[9]
    assert sampler.choose(rows, [7]) is None
    rows[0, 9] += 0.01
    assert sampler.choose(rows, [7]) == [9]


def test_near_tie_of_the_likeliest_token_and_one_with_much_noise_is_left_to_the_exact_steps() -> None:
    """The bound that is compared before the noise is computed is tightest where the noise is greatest."""
    sampler = Sampler(SamplingParams(temp=1.0, seed=3), WIDTH)
    noise = gumbel(np, 3, [226], WIDTH)[0]
    token, other = noise.argmax(), noise.argmin()
    rows = np.full((1, WIDTH), -100, np.float32)
    rows[0, other], rows[0, token] = 10, 10 - (noise[token] - noise[other])
    assert mx.argmax(sampler.scores(mx.array(rows), [226]), axis=-1).tolist() == [token]
    assert sampler.choose(rows, [226]) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_left_to_the_exact_steps(bad: float) -> None:
    rows = np.zeros((1, 64), np.float32)
    rows[:] = bad
    assert Sampler(SamplingParams(temp=0.8, seed=1), 64).choose(rows, [3]) is None
    assert Sampler(SamplingParams(), 64).choose(rows, [3]) is None


@matrix(
    temp=[0.5, 0.8, 1.5],
    top_p=[1.0, 0.5, 0.9, 0.95, 0.99],
    top_k=[0, 1, 5, 40, 1000],
    min_p=[0.0, 0.05],
    spread=[0.5, 2.0, 4.0],
    seed=range(6),
)
def test_filtered_choice_equals_that_of_the_exact_steps(
    temp: float, top_p: float, top_k: int, min_p: float, spread: float, seed: int
) -> None:
    params = SamplingParams(temp=temp, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    sampler = Sampler(params, WIDTH)
    rows = logits(seed, spread)
    for row, position in enumerate(POSITIONS):
        chosen = sampler.choose(rows[row : row + 1], [position])
        scores = sampler.scores(mx.array(rows[row : row + 1]), [position])
        assert chosen is None or chosen == mx.argmax(scores, axis=-1).tolist()


def test_filters_seldom_need_the_exact_steps() -> None:
    """With logits like a model's: a few likely tokens above many unlikely ones."""
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(200, WIDTH)) * 2).astype(np.float32)
    for row in rows:
        row[rng.integers(0, WIDTH, 30)] += rng.exponential(4, 30) + 8
    sampler = Sampler(SamplingParams(temp=0.8, seed=1, top_p=0.95, top_k=64), WIDTH)
    left = sum(sampler.choose(rows[row : row + 1], [row]) is None for row in range(len(rows)))
    assert left <= 10


def test_ties_at_the_border_of_a_filter_are_left_to_the_exact_steps() -> None:
    """Of two equal tokens only one is within the nucleus or among the best k."""
    rows = np.full((1, WIDTH), -100, np.float32)
    rows[0, 5] = rows[0, 9] = 10
    rows[0, 7] = 10.5
    for params in (SamplingParams(temp=1.0, top_k=2), SamplingParams(temp=1.0, top_p=0.6)):
        choices = [Sampler(replace(params, seed=seed), WIDTH).choose(rows, [3]) for seed in range(40)]
        assert None in choices and [7] in choices and [5] not in choices and [9] not in choices


def test_forbidden_tokens_are_never_chosen() -> None:
    rows = np.full((1, WIDTH), -np.inf, np.float32)
    rows[0, 17] = -3
    sampler = Sampler(SamplingParams(temp=2.0, seed=1), WIDTH)
    assert sampler.choose(rows, [3]) == [17]
    rows[0, 40:60] = -4
    assert sampler.choose(rows, [3]) == mx.argmax(sampler.scores(mx.array(rows), [3]), axis=-1).tolist()
