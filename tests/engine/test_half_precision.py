"""A target in half precision is sampled from softmax(logits / T), computed in float32 from its rounded logits.

`OUTRIDER_SEEDS=40000 pytest -s tests/engine/test_half_precision.py` runs more seeds and prints mlx-lm's results, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
import scipy
from mlx_lm.sample_utils import make_sampler

from outrider.engine.residual import Draws, make_target_sampler
from outrider.engine.sampling import Sampler, SamplingMetadata
from outrider.engine.steps import make_step
from outrider.protocol.sampling import SamplingParams
from tests.logprobs import filtered_logprobs

SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "500"))
V = 64
HALVES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
# Between 16 and 32, where the steps of bfloat16 are 0.125; the best dozen share most of the mass.
LOGITS = np.clip(29.5 - np.abs(np.random.default_rng(11).normal(size=(1, V))) * 4, 16, 31).astype(np.float32)
FILTERED = {"top_p": 0.9, "min_p": 0.01, "top_k": 20}
PENALISED = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "logit_bias": ((5, 0.7),)}
HISTORY = [[3, 9, 9, 40, 5]]


def half(kind: str) -> mx.array:
    return mx.array(LOGITS).astype(HALVES[kind])


def probabilities_of(logits: mx.array, temp: float) -> np.ndarray:
    """softmax(logits / temp) in float64, [V]."""
    scaled = np.array(logits.astype(mx.float32)).astype(np.float64)[0] / temp
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


def variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square test; cells with an expected count below five are pooled."""
    expected = p * counts.sum()
    common = expected >= 5
    cells = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    seen, wanted = (cell[:-1] if cells[1][-1] < 5 else cell for cell in cells)
    return float(scipy.stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


def count_choices(logits: mx.array, temp: float, rule: str, seeds: Sequence[int]) -> np.ndarray:
    """Counts how often the target chooses each token, one position per seed."""
    counts = np.zeros(V)
    for seed in seeds:
        sampler = make_target_sampler(SamplingParams(temp=temp, seed=seed, rule=rule), V)
        counts[int(mx.argmax(sampler.scores(logits, [seed % 97]), axis=-1).item())] += 1  # type: ignore[arg-type]
    return counts


@pytest.mark.parametrize("temp", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("kind", sorted(HALVES))
def test_choices_follow_the_softmax_of_the_logits(kind: str, temp: float) -> None:
    logits = half(kind)
    p = probabilities_of(logits, temp)
    ours = count_choices(logits, temp, "coupled", range(SEEDS))
    mx.random.seed(1)
    theirs = make_sampler(temp)(mx.repeat(logits - mx.logsumexp(logits, keepdims=True), SEEDS, axis=0))
    peer = np.bincount(np.array(theirs), minlength=V)
    print(
        f"\n{kind} T = {temp}: {SEEDS} seeds, p = {p_value(ours, p):.3g}, variation {variation(ours / SEEDS, p):.2%};"
        f" mlx-lm: p = {p_value(peer, p):.3g}, variation {variation(peer / SEEDS, p):.2%}"
    )
    assert p_value(ours, p) > 1e-3


@pytest.mark.parametrize("temp", [0.05, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("kind", sorted(HALVES))
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_scores_minus_noise_have_the_distribution_of_the_logits(
    kind: str, temp: float, normalised: bool, rule: str
) -> None:
    """Compares the distributions themselves, not samples."""
    params, logits = SamplingParams(temp=temp, seed=4, rule=rule), half(kind)
    sampler = make_target_sampler(params, V) if rule == "residual" else Sampler(params, V, normalised=normalised)
    scores = sampler.scores(logits, [6])
    assert scores.dtype == mx.float32
    # A float32 score of 30 / 0.05 has steps of 6e-5.
    scores -= mx.array(sampler.noise_at(6))
    assert variation(probabilities_of(scores, 1.0), probabilities_of(logits, temp)) < 1e-4


@pytest.mark.parametrize("kind", sorted(HALVES))
@pytest.mark.parametrize("changes", [{}, FILTERED, PENALISED, {**FILTERED, **PENALISED}], ids=str)
def test_every_path_scores_half_precision_as_float32(kind: str, changes: dict) -> None:
    """The paths: the target, the drafter's tree, its draws, and a residual target's p; with penalties and filters."""
    logits = half(kind)
    wide = logits.astype(mx.float32)
    for rule in ("coupled", "residual"):
        params = SamplingParams(temp=0.7, seed=9, rule=rule, **changes)
        target, draft = make_target_sampler(params, V), Sampler(params, V, normalised=False)
        assert mx.array_equal(filtered_logprobs(logits, HISTORY, params), filtered_logprobs(wide, HISTORY, params))
        assert mx.array_equal(target.scores(logits, [3], HISTORY), target.scores(wide, [3], HISTORY))
        ours, exact = (make_step([SamplingMetadata(draft, [3], HISTORY)], given).row(0) for given in (logits, wide))
        assert mx.array_equal(ours, exact)
    p = [target.log_p(given, HISTORY) for given in (logits, wide)]  # type: ignore[attr-defined]
    assert np.array_equal(*p)
    draws = Draws(seed=9, width=8, saguaro=0.5, cached=2)
    got, want = (
        draws.make_step(SamplingMetadata(draft, [3], HISTORY), given, [3]).q(0)  # type: ignore[attr-defined]
        for given in (logits, wide)
    )
    assert np.array_equal(got.ids, want.ids) and np.array_equal(got.probs, want.probs)


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_greedy_scores_equal_mlx_lms_bit_for_bit(kind: str) -> None:
    """So greedy choices among nearly equal logits are those of `mlx_lm.generate`."""
    logits = half(kind)
    scores = make_target_sampler(SamplingParams(), V).scores(logits, [3])
    assert mx.array_equal(scores, logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("kind", ["float32", *sorted(HALVES)])
@pytest.mark.parametrize("temp", [1e-3, 1e-4, 1e-5, 1e-8, 1e-20, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("changes", [{}, FILTERED])
@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_a_temperature_near_zero_is_greedy(kind: str, temp: float, changes: dict, rule: str) -> None:
    logits = mx.array(LOGITS).astype(getattr(mx, kind))
    logits[:, 17] = logits.max() + 1
    params = SamplingParams(temp=temp, seed=2, rule=rule, **changes)
    sampler = make_target_sampler(params, V)
    assert mx.argmax(sampler.scores(logits, [8]), axis=-1).item() == 17
    step = make_step([SamplingMetadata(Sampler(params, V, normalised=False), [8])], logits)
    assert step.best() == [17]
    if params.is_residual:
        assert int(sampler.log_p(logits)[0].argmax()) == 17  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["float32", *sorted(HALVES)])
def test_lowest_temperature_still_chooses_among_equal_logits(kind: str) -> None:
    """Two equal best logits, frequent in bfloat16, are each chosen half of the time."""
    logits = mx.full((1, V), 16.0, getattr(mx, kind))
    logits[:, [20, 40]] = mx.array(31.0, getattr(mx, kind))
    counts = count_choices(logits, 1e-3, "coupled", range(400))
    assert counts[20] + counts[40] == 400 and scipy.stats.binomtest(int(counts[20]), 400).pvalue > 1e-3
