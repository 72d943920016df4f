"""Over many seeds the tokens of a text have exactly the target's probabilities, whatever way each of them came.

A toy target of five tokens, whose probabilities are computed one by one; chi-square on the marginals of the second and
third generated token and on their joint. (The first is always a plain step.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chisquare

from engine.loading import LoadedModel
from engine.sampling import warp
from protocol.sampling import SamplingParams
from tests.system.cluster import AMPLE, SLOW, Cluster
from tests.system.small import TOY

SEEDS = 600
COUNTED = 3
LEAST_EXPECTED = 5.0
# Seeds are fixed, so a correct program passes always; a wrong one is off by many orders of magnitude.
ALPHA = 1e-3
# Every pair of tokens occurs, so that after any token there is an n-gram to propose.
PROMPT = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 2, 4, 1, 3, 0, 3, 1, 4, 2, 0, 4, 3, 2, 1, 0]
SAMPLING = SamplingParams(max_tokens=4, temp=1.0, top_p=0.95, repetition_penalty=1.2, repetition_context_size=4)


@dataclass(frozen=True)
class Path:
    """A cluster in which the tokens come one way; `usual` sources of chains make up most of its rounds."""

    draft: str | None
    mode: str
    settings: dict[str, Any]
    usual: tuple[str, ...]


PATHS = {
    "ar": Path(None, "ar", {}, ("none",)),
    "hit": Path("model", "ssd", {"branches": 16, "schedule": AMPLE, "full_depth": True, "ngrams": False}, ("hit",)),
    "miss": Path("random", "ssd", {"branches": 1, "schedule": SLOW, "ngrams": False}, ("miss", "drafter")),
    "sd": Path("model", "sd", {"ngrams": False}, ("drafter",)),
    "n-gram": Path(None, "ssd", {}, ("ngram",)),
}


def exact(model: LoadedModel) -> dict[tuple[int, ...], float]:
    """Probability of each three tokens after the prompt: each one's by a forward over all before it."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(COUNTED):
        found = {
            (*before, token): share * after
            for before, share in found.items()
            for token, after in enumerate(following(model, [*PROMPT, *before]))
        }
    return found


def following(model: LoadedModel, text: Sequence[int]) -> list[float]:
    logprobs = warp(model.model(mx.array([list(text)]))[0, -1:], [text], SAMPLING)
    return mx.softmax(logprobs[0]).tolist()


def p_value(counted: Counter[Any], expected: dict[Any, float]) -> float:
    """Chi-square of counts against probabilities; what is expected less than five times is taken together."""
    total = sum(counted.values())
    assert all(expected[key] > 0 for key in counted), "a token that the target never says"
    common = [key for key, share in expected.items() if share * total >= LEAST_EXPECTED]
    seen = [counted[key] for key in common]
    wanted = [expected[key] * total for key in common]
    if total - sum(wanted) > 1e-6:
        seen, wanted = [*seen, total - sum(seen)], [*wanted, total - sum(wanted)]
    return float(chisquare(seen, np.array(wanted) * total / sum(wanted)).pvalue)


def summed(shares: dict[tuple[int, ...], float], places: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    found = dict.fromkeys(product(range(TOY["vocab_size"]), repeat=len(places)), 0.0)
    for tokens, share in shares.items():
        found[tuple(tokens[place] for place in places)] += share
    return found


@pytest.mark.parametrize("name", PATHS)
def test_tokens_have_the_targets_probabilities(
    make_cluster: Callable[..., Cluster], small_pair: Callable[..., Any], name: str
) -> None:
    path = PATHS[name]
    cluster = make_cluster(path.draft, config=TOY, depth=2, **path.settings)
    texts: list[tuple[int, ...]] = []
    sources: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = cluster.run(PROMPT, SamplingParams(**{**params(), "seed": 7919 * seed + 1}), path.mode)
        texts.append(tuple(run.tokens))
        sources.update(round_.source for round_ in run.rounds if 0 < round_.base_len - len(PROMPT) < COUNTED)
    shares = exact(small_pair("self", **TOY)[0])
    assert sum(sources[source] for source in path.usual) > 0.8 * sum(sources.values()), sources
    for places in ((0,), (1,), (2,), (1, 2)):
        counted = Counter(tuple(text[place] for place in places) for text in texts)
        assert p_value(counted, summed(shares, places)) > ALPHA, (places, counted)


def params() -> dict[str, Any]:
    return {name: getattr(SAMPLING, name) for name in SAMPLING.__slots__}


def test_the_check_sees_a_wrong_distribution(small_pair: Callable[..., Any]) -> None:
    """One in which the likeliest token has three fifths more than its due."""
    shares = summed(exact(small_pair("self", **TOY)[0]), (1,))
    most = max(shares, key=lambda key: shares[key])
    wrong = {key: share * (1.6 if key == most else 1.0) for key, share in shares.items()}
    counted = Counter({key: round(SEEDS * share / sum(wrong.values())) for key, share in wrong.items()})
    assert p_value(counted, shares) < ALPHA
