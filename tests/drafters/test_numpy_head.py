"""Heads by numpy equal heads by MLX; what numpy does not support, or not correctly, is left to MLX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads import pair_kv_cache
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.load import host_of
from outrider.drafters.heads.load import load as load_head
from outrider.drafters.heads.pair_kv_cache import NumpyHead
from outrider.drafters.heads.proposers import ChainState, proposer_of
from outrider.engine import numpy_net
from outrider.engine.loading import LoadedModel
from outrider.engine.numpy_net import MOST_ROWS
from outrider.protocol.sampling import SamplingParams
from tests.target_worker.heads import (
    H,
    latent_head,
    markov_llama,
    mtp_head,
    parallel_token_head,
    random_head,
    recurrent_head,
    token_head,
    write_feature_head,
)

LENGTHS = (20, 7, 33)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return markov_llama(tmp_path_factory.mktemp("markov"))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs each forward of numpy's was of."""
    counts, plain = list[int](), NumpyHead.hidden

    def hidden(self: NumpyHead, tokens: Any, *rest: Any) -> Any:
        counts.append(len(tokens))
        return plain(self, tokens, *rest)

    monkeypatch.setattr(NumpyHead, "hidden", hidden)
    return counts


def chains(head: Head, target: LoadedModel, numpy: NumpyHead | None, temp: float) -> list[tuple[int, ...]]:
    """What is drafted for three texts together, over rounds of which a token each holds."""
    draws = np.random.default_rng(1)
    own = HeadDrafter(head, target.vocab_size, proposer=proposer_of(head, numpy))
    texts = [draws.integers(0, 200, length).tolist() for length in LENGTHS]
    followers = [own.follow(SamplingParams(temp=temp, seed=seed)) for seed in range(len(texts))]
    found, heard = list[tuple[int, ...]](), [0] * len(texts)
    for _ in range(4):
        for number, (text, follower) in enumerate(zip(texts, followers, strict=True)):
            rows = draws.standard_normal((len(text) - 1 - heard[number], head.points.count * H))
            follower.add_features(heard[number], head.fuse(mx.array(rows, mx.float32)))
            heard[number] = len(text) - 1
        lines = [ChainState(follower, text) for follower, text in zip(followers, texts, strict=True)]
        found += [one.chain for one in own.continuations(lines, [4, 2, 3])]
        texts = [[*text, number] for number, text in enumerate(texts)]
    return found


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("make", [mtp_head, random_head, token_head, parallel_token_head])
def test_numpy_drafts_what_mlx_drafts(
    target: LoadedModel, fed: list[int], make: Callable[[LoadedModel], Head], temp: float
) -> None:
    head = make(target)
    numpy = host_of(head, target)
    assert numpy is not None
    fed.clear()
    by_numpy = chains(head, target, numpy, temp)
    assert fed
    fed.clear()
    assert by_numpy == chains(head, target, None, temp)
    assert not fed
    assert all(len(chain) >= 2 for chain in by_numpy)


@pytest.mark.parametrize("make", [latent_head, recurrent_head])
def test_other_heads_are_left_to_mlx(target: LoadedModel, make: Callable[[LoadedModel], Head]) -> None:
    assert host_of(make(target), target) is None


def test_a_head_of_a_target_that_numpy_does_not_serve_is_left_to_mlx(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.numpy_net._MOST_BYTES", 1000)
    assert host_of(mtp_head(target), target) is None


def test_a_head_of_a_target_in_half_precision_is_left_to_mlx(tmp_path: Path) -> None:
    half = markov_llama(tmp_path)
    half.model.set_dtype(mx.float16)
    assert host_of(random_head(half), half) is None


@pytest.mark.parametrize("make", [mtp_head, random_head])
def test_wrong_vectors_are_caught_at_load(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, make: Callable[[LoadedModel], Head]
) -> None:
    head = make(target)
    monkeypatch.setattr(numpy_net, "hidden", lambda seen: None)
    assert host_of(head, target) is None


def test_wrong_logits_are_caught_at_load(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head(target)
    monkeypatch.setattr(pair_kv_cache.NumpyHead, "logits", lambda self, hidden: mx.zeros((len(hidden), 258)))
    assert host_of(head, target) is None


def test_many_pairs_are_read_by_mlx(target: LoadedModel, fed: list[int]) -> None:
    head = mtp_head(target)
    own = HeadDrafter(head, target.vocab_size, proposer=proposer_of(head, host_of(head, target)))
    follower, text = own.follow(SamplingParams()), [5] * (MOST_ROWS + 2)
    follower.add_features(0, mx.ones((len(text) - 1, H)))
    fed.clear()
    own.continuations([ChainState(follower, text)], [3])
    assert fed == [1, 1]


def test_loaded_heads_are_numpys(target: LoadedModel, fed: list[int], tmp_path: Path) -> None:
    load_head("eagle3", str(write_feature_head(tmp_path / "head", target)), target, lambda stage: None)
    assert fed
