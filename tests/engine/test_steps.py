"""Reading tokens from one forward's scores."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.sampling import best_tokens
from outrider.engine.steps import Step


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from([2, 50, 10**9]))
def test_the_best_tokens_are_those_of_a_stable_sort(size: int, count: int, seed: int, levels: int) -> None:
    """Few `levels` make many equal scores."""
    scores = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    assert best_tokens(scores, count).tolist() == np.argsort(-scores, kind="stable")[:count].tolist()


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([2, 50, 10**9]))
def test_the_best_two_tokens_are_those_of_a_stable_sort(size: int, seed: int, levels: int) -> None:
    """Their gap tells how sure a drafter is of a token."""
    scores = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    assert best_tokens(scores, 2).tolist() == np.argsort(-scores, kind="stable")[:2].tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_device_and_the_host_find_the_same_candidates(count: int) -> None:
    scores = mx.array(np.random.default_rng(3).standard_normal((4, 500)).astype(np.float32))
    host, device = Step(scores), Step(scores)
    device._on_cpu = False
    assert device.candidates([0, 2, 3], count) == host.candidates([0, 2, 3], count)


@pytest.mark.parametrize("allowed", [1, 5, 12_288, 49_152])
def test_forbidden_tokens_come_last(allowed: int) -> None:
    """Such as tokens that a grammar forbids, or that a draft with a smaller vocabulary lacks."""
    draws = np.random.default_rng(allowed)
    scores = np.full(49_152, -np.inf, np.float32)
    places = draws.permutation(len(scores))[:allowed]
    scores[places] = draws.standard_normal(allowed)
    found = best_tokens(scores, 12)
    assert found.tolist()[:allowed] == np.argsort(-scores, kind="stable")[: min(12, allowed)].tolist()
    assert len(set(found.tolist())) == 12
