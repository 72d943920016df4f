"""Filters and penalties are mlx-lm's, and scores only add the noise."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import scipy
from mlx_lm.sample_utils import make_logits_processors

from outrider.engine.noise import gumbel
from outrider.engine.sampling import Sampler
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tests.logprobs import filtered_logprobs

V = 50


@pytest.fixture
def logits() -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal((4, V)).astype(np.float32) * 3)


def test_greedy_warp_is_mlx_lms_log_softmax(logits: mx.array) -> None:
    ours = filtered_logprobs(logits, None, SamplingParams(top_p=0.5, top_k=3))  # no filters at temperature 0
    for row in range(4):
        one = logits[row : row + 1]
        assert mx.array_equal(ours[row : row + 1], one - mx.logsumexp(one, keepdims=True))


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The filters by their definitions, one row, float64."""
    logp = logits.astype(np.float64)
    logp = logp - np.log(np.exp(logp).sum())
    order = np.argsort(-logp)
    if 0 < params.top_p < 1:
        above = np.cumsum(np.exp(logp[order])) - np.exp(logp[order])
        logp[order[above >= params.top_p]] = -np.inf
    if params.min_p:
        logp[logp < logp.max() + np.log(params.min_p)] = -np.inf
    if params.top_k:
        logp[np.argsort(-logp)[params.top_k :]] = -np.inf
    return logp / params.temp


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.05, "top_k": 4}, {"top_k": V}],
)
def test_filters_match_their_definitions(logits: mx.array, changes: dict) -> None:
    params = SamplingParams(temp=0.7, seed=1, **changes)
    ours = np.array(filtered_logprobs(logits, None, params))
    for row in range(4):
        np.testing.assert_allclose(ours[row], reference(np.array(logits[row]), params), rtol=1e-5, atol=1e-5)


def test_penalties_use_the_history_of_each_row(logits: mx.array) -> None:
    params = SamplingParams(
        repetition_penalty=1.3,
        repetition_context_size=4,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        frequency_context_size=6,
        logit_bias=((3, 2.5), (V + 7, 9.0)),
    )
    histories = [[1, 2, 2, 3, 4, 5, 5, 5], [], mx.array([9, 9, 8]), list(range(40))]
    ours = filtered_logprobs(logits, histories, params)
    processors = make_logits_processors({3: 2.5}, 1.3, 4, 0.5, 20, 0.25, 6)
    for row, history in enumerate(histories):
        one = mx.array(np.array(logits[row : row + 1]))
        for processor in processors:
            one = processor(mx.array(history, dtype=mx.int32), one)
        assert mx.array_equal(ours[row], (one - mx.logsumexp(one))[0])
    assert mx.array_equal(logits, mx.array(np.random.default_rng(0).standard_normal((4, V)).astype(np.float32) * 3))


def test_penalties_without_history_are_refused(logits: mx.array) -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1.0), V)
    assert sampler.needs_history
    with pytest.raises(InvalidRequest, match="penalties"):
        sampler.scores(logits, [0, 1, 2, 3])


def test_temperature_without_seed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        Sampler(SamplingParams(temp=0.5), V)


def test_scores_add_the_noise_of_their_positions(logits: mx.array) -> None:
    params = SamplingParams(temp=0.7, top_p=0.9, seed=2**50 + 1)
    sampler = Sampler(params, V)
    assert not sampler.needs_history
    for positions in ([5, 6, 7, 8], [100, 3, 100, 77], [0, 7, 8, 16], list(range(40, 44))):
        scores = np.array(sampler.scores(logits, positions))
        expected = np.array(filtered_logprobs(logits, None, params)) + gumbel(np, 2**50 + 1, positions, V)
        assert np.array_equal(scores, expected)


@pytest.mark.parametrize("top_p", [1e-7, 1e-38, 1e-40, 1e-46, 5e-324])
def test_likeliest_token_passes_the_smallest_top_p(logits: mx.array, top_p: float) -> None:
    scores = Sampler(SamplingParams(temp=1.0, top_p=top_p, seed=4), V).scores(logits, [9, 10, 11, 12])
    assert mx.isfinite(scores.max(axis=-1)).all()
    assert mx.array_equal(scores.argmax(axis=-1), logits.argmax(axis=-1))


def test_rows_do_not_influence_each_other(logits: mx.array) -> None:
    params = SamplingParams(temp=1.0, top_p=0.95, min_p=0.01, top_k=20, seed=4)
    sampler = Sampler(params, V)
    together = sampler.scores(logits, [9, 10, 11, 12])
    for row in range(4):
        assert mx.array_equal(together[row], Sampler(params, V).scores(logits[row : row + 1], [9 + row])[0])


def test_unnormalised_scores_differ_by_a_constant_per_row(logits: mx.array) -> None:
    for changes in ({}, {"temp": 0.8, "top_k": 7}, {"temp": 0.8, "top_p": 0.9}):
        params = SamplingParams(seed=1, **changes)
        scores = [np.array(Sampler(params, V, normalised=n).scores(logits, range(4))) for n in (True, False)]
        for exact, loose in zip(*scores, strict=True):
            assert np.array_equal(np.isinf(exact), np.isinf(loose))
            kept = ~np.isinf(exact)
            assert np.ptp(exact[kept] - loose[kept]) < 1e-5


def test_padding_of_the_vocabulary_changes_no_choice(logits: mx.array) -> None:
    params = SamplingParams(temp=1.0, seed=3, top_p=0.9)
    padded = mx.concatenate([logits, mx.full((4, 14), -mx.inf)], axis=-1)
    narrow = mx.argmax(Sampler(params, V).scores(logits, range(4)), axis=-1)
    assert mx.array_equal(narrow, mx.argmax(Sampler(params, V + 14).scores(padded, range(4)), axis=-1))


@pytest.mark.parametrize("changes", [{"temp": 1.0}, {"temp": 0.6, "top_p": 0.9}, {"temp": 1.5, "min_p": 0.1}])
def test_choices_follow_the_warped_distribution(logits: mx.array, changes: dict) -> None:
    wanted = None
    counts = np.zeros(V)
    rows = mx.repeat(logits[:1], 256, axis=0)
    for seed in range(24):
        params = SamplingParams(seed=seed, **changes)
        counts += np.bincount(np.array(mx.argmax(Sampler(params, V).scores(rows, range(256)), axis=-1)), minlength=V)
        wanted = np.exp(reference(np.array(logits[0]), params)) if wanted is None else wanted
    expected = wanted / wanted.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def test_filters_are_not_compiled_for_each_value(logits: mx.array, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds on a CPU; models' own compiled functions must stay compiled."""
    seen: list[str] = []
    monkeypatch.setattr(mx, "disable_compile", lambda: seen.append("off"))
    monkeypatch.setattr(mx, "enable_compile", lambda: seen.append("on"))
    filtered_logprobs(logits, None, SamplingParams(temp=0.7, seed=1, top_p=0.87654))
    assert seen == ["off", "on"]
    filtered_logprobs(logits, None, SamplingParams())
    assert seen == ["off", "on"]
