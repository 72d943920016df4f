"""A target's own head computes what an independent forward computes, by each family's names; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafting.heads.load import load as load_head
from outrider.drafting.heads.mtp_files import read
from outrider.drafting.heads.pairs import PairFeed, Pairs
from outrider.engine.loading import LoadedModel, load
from outrider.engine.taps import TapPoints
from outrider.protocol.errors import CannotDraft
from tests.drafting.mtp_heads import NAMES, H, by_numpy, model_of, weights_of, written


@pytest.fixture
def target(tiny_model: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    def get(family: str) -> LoadedModel:
        return load(model_of(tiny_model, family))

    return get


@pytest.mark.parametrize("family", NAMES)
def test_a_head_computes_what_an_independent_forward_does(
    target: Callable[[str], LoadedModel], tmp_path: Path, family: str
) -> None:
    model, draws = target(family), np.random.default_rng(1)
    head = read(written(tmp_path, family), model)
    assert head.points == TapPoints(after_norm=True)
    rows, tokens = draws.standard_normal((30, H)).astype(np.float32), draws.integers(0, 250, 30)
    logits, onward = by_numpy(family, model, tokens, rows)
    pairs, done = Pairs(head), 0
    text, other = pairs.open(), pairs.open()
    for count in (12, 5, 1, 12):
        part = slice(done, done + count)
        feeds = [
            PairFeed(text, mx.array(tokens[part]), mx.array(rows[part])),
            PairFeed(other, mx.array([3]), mx.ones((1, H))),
        ]
        hidden, done = pairs.forward(feeds), done + count
        np.testing.assert_allclose(np.array(head.logits(hidden))[0], logits[done - 1], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.array(head.onward(hidden))[0], onward[done - 1], rtol=1e-3, atol=1e-3)
    own = weights_of(family)
    size = sum(value.shape[0] for key, value in own.items() if key.endswith(("k_proj.weight", "v_proj.weight")))
    assert head.bytes_per_pair == 4 * size


def test_what_cannot_be_used_is_refused_in_a_sentence(target: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = target("qwen3_5")
    with pytest.raises(CannotDraft, match=r"holds no mtp\.\* tensors"):
        read(tmp_path, model)
    for other, sentence in (
        ({"mtp.fc.weight": None}, "lacks fc.weight"),
        ({"mtp.norm.weight": np.ones(3)}, r"norm.weight is \(3,\), expected \(64,\)"),
        ({"mtp.embed_tokens.weight": np.ones(3)}, "has embed_tokens.weight, too, which is not known"),
        ({"mtp.fc.scales": np.ones(3)}, "is quantised"),
    ):
        with pytest.raises(CannotDraft, match=sentence):
            read(written(tmp_path, "qwen3_5", **other), model)
    with pytest.raises(CannotDraft, match="expected no shards, or eagle3"):
        load_head("mtp", str(tmp_path), model, lambda stage: None, alone=False)
    with pytest.raises(CannotDraft, match="heads of llama models are not known here"):
        read(tmp_path, target("llama"))
