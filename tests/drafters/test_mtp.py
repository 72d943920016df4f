"""A target's MTP head equals an independent forward, with each family's tensor names; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.load import load as load_head
from outrider.drafters.heads.mtp import read_head
from outrider.drafters.heads.pair_kv_cache import PairKVCache
from outrider.engine.hidden_states import AFTER_NORM
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.errors import CannotDraft
from tests.drafters import nextn_heads
from tests.drafters.mtp_heads import NAMES, H, by_numpy, model_of, weights_of, write, write_head
from tests.drafters.pair_feeds import PairFeed, slots


@pytest.fixture
def target(tiny_model: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    def get(family: str) -> LoadedModel:
        return load(model_of(tiny_model, family))

    return get


@pytest.mark.parametrize("family", NAMES)
def test_head_equals_an_independent_forward(target: Callable[[str], LoadedModel], tmp_path: Path, family: str) -> None:
    model, draws = target(family), np.random.default_rng(1)
    head = read_head(write_head(tmp_path, family), model)
    assert head.points == (AFTER_NORM,)
    rows, tokens = draws.standard_normal((30, H)).astype(np.float32), draws.integers(0, 250, 30)
    logits, next_features = by_numpy(family, model, tokens, rows)
    pairs, done = PairKVCache(head), 0
    sequence, other = pairs.open(), pairs.open()
    for count in (12, 5, 1, 12):
        part = slice(done, done + count)
        feeds = [
            PairFeed(sequence, mx.array(tokens[part]), mx.array(rows[part])),
            PairFeed(other, mx.array([3]), mx.ones((1, H))),
        ]
        hidden, slot_logits = slots(pairs, feeds, [1, 1])
        done += count
        np.testing.assert_allclose(np.array(slot_logits)[0], logits[done - 1], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.array(hidden)[0], next_features[done - 1], rtol=1e-3, atol=1e-3)
    own = weights_of(family)
    size = sum(value.shape[0] for key, value in own.items() if key.endswith(("k_proj.weight", "v_proj.weight")))
    assert head.bytes_per_pair == 4 * size


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_norms_that_a_conversion_stored_whole_are_read_as_they_are(
    target: Callable[[str], LoadedModel], tmp_path: Path, family: str
) -> None:
    """Qwen stores them as differences from 1; conversions to MLX that keep the head add the 1."""
    model, own = target(family), weights_of(family)
    whole = {key: value + 1 for key, value in own.items() if value.ndim == 1}
    heads = [read_head(write_head(tmp_path, family, **other), model) for other in ({}, whole)]
    norms = [[head.norm.weight, head.norm_hidden.weight, head.layers[0].self_attn.q_norm.weight] for head in heads]
    for one, other in zip(*norms, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-6)


@pytest.fixture
def nextn(tiny_model: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    return lambda family: load(tiny_model("llama", **nextn_heads.MODELS[family]))


@pytest.mark.parametrize("family", nextn_heads.MODELS)
def test_nextn_layer_equals_an_independent_forward(
    nextn: Callable[[str], LoadedModel], tmp_path: Path, family: str
) -> None:
    """DeepSeek's and GLM's heads. Latent attention computes one text at a time; the head returns normed vectors."""
    model, draws = nextn(family), np.random.default_rng(1)
    head = read_head(write(tmp_path, nextn_heads.weights_of(family, model)), model)
    assert head.points == (AFTER_NORM,) and head.together == (family == "glm4_moe")
    assert "lm_head" not in head and "embed_tokens" not in head  # copies of the target's
    rows, tokens = draws.standard_normal((30, H)).astype(np.float32), draws.integers(0, 250, 30)
    logits, next_features = nextn_heads.by_numpy(family, model, tokens, rows)
    pairs, done = PairKVCache(head), 0
    sequence, other = pairs.open(), pairs.open()
    for count in (12, 5, 1, 12):
        part = slice(done, done + count)
        feeds = [
            PairFeed(sequence, mx.array(tokens[part]), mx.array(rows[part])),
            PairFeed(other, mx.array([3]), mx.ones((1, H))),
        ]
        hidden, slot_logits = slots(pairs, feeds, [1, 1])
        done += count
        np.testing.assert_allclose(np.array(slot_logits)[0], logits[done - 1], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.array(hidden)[0], next_features[done - 1], rtol=1e-3, atol=1e-3)
    saved = pairs.save(sequence, 30)
    assert saved.nbytes == 30 * head.bytes_per_pair


def test_tensors_in_float8_are_read_with_their_scale(nextn: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = nextn("deepseek_v3")
    weights = nextn_heads.weights_of("deepseek_v3", model)
    stored = nextn_heads.in_fp8(weights, f"{nextn_heads.PREFIX}eh_proj.weight")
    head = read_head(write(tmp_path, {**weights, **stored}), model)
    assert np.array_equal(np.array(head.fc.weight), weights[f"{nextn_heads.PREFIX}eh_proj.weight"])


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("mlp.experts.3.up_proj.weight", "lacks .*experts.3.up_proj.weight"),
        ("eh_proj.weight", "lacks fc.weight"),
        ("mlp.gate.e_score_correction_bias", "lacks layers.0.mlp.gate.e_score_correction_bias"),
    ],
)
def test_nextn_layer_with_missing_tensors_is_refused(
    nextn: Callable[[str], LoadedModel], tmp_path: Path, missing: str, sentence: str
) -> None:
    model = nextn("glm4_moe")
    weights = nextn_heads.weights_of("glm4_moe", model)
    with pytest.raises(CannotDraft, match=sentence):
        read_head(write(tmp_path, {**weights, f"{nextn_heads.PREFIX}{missing}": None}), model)


def test_unusable_head_is_refused_with_a_reason(target: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = target("qwen3_5")
    with pytest.raises(CannotDraft, match=r"has no tensors mtp\.\* in .safetensors files"):
        read_head(tmp_path, model)
    for other, sentence in (
        ({"mtp.fc.weight": None}, "lacks fc.weight"),
        ({"mtp.norm.weight": np.ones(3)}, r"norm.weight is \(3,\), expected \(64,\)"),
        ({"mtp.head.weight": np.ones(3)}, "has head.weight, which is not supported"),
        ({"mtp.fc.scales": np.ones(3)}, "is quantised"),
    ):
        with pytest.raises(CannotDraft, match=sentence):
            read_head(write_head(tmp_path, "qwen3_5", **other), model)
    with pytest.raises(CannotDraft, match="use it without shards, or use eagle3"):
        load_head("mtp", str(tmp_path), model, lambda stage: None, unsharded=False)
    with pytest.raises(CannotDraft, match="MTP heads of qwen2 models are not supported"):
        read_head(tmp_path, target("qwen2"))
