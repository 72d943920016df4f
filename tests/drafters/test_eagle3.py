"""EAGLE-3 heads equal an independent forward in every published layout; others are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.eagle3 import Eagle3, build
from outrider.drafters.heads.pair_kv_cache import PairKVCache
from outrider.engine.hidden_states import AFTER_NORM
from outrider.protocol.errors import CannotDraft, ModelError
from tests.drafters.eagle3_heads import LAYOUTS, MASK, OFFICIAL_TAPS, PARALLEL, TAPS, TARGET, H, NumpyHead, V, write
from tests.drafters.pair_feeds import PairFeed, slots

RNG = np.random.default_rng(3)
EMBEDDING, OUTPUT = RNG.standard_normal((2, V, H)).astype(np.float32)


def head_of(folder: Path, target: dict[str, Any] = TARGET, vocab_size: int = V) -> Eagle3:
    own = HeadTarget(
        target, vocab_size, 32768, lambda tokens: mx.array(EMBEDDING)[tokens], lambda rows: rows @ mx.array(OUTPUT).T
    )
    return build(HeadCheckpoint.read(folder, own))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_equals_an_independent_forward(tmp_path: Path, layout: str) -> None:
    """Logits after pairs of two texts, read in pieces of any length, and the vectors that replace the next features."""
    head, truth = head_of(write(tmp_path, layout)), NumpyHead(layout, EMBEDDING, OUTPUT)
    assert head.points == (TAPS.get(layout, OFFICIAL_TAPS) or (AFTER_NORM,))
    pairs = PairKVCache(head)
    sequences = [pairs.open() for _ in range(2)]
    rows = [RNG.standard_normal((60, len(head.points) * H)).astype(np.float32) * 3 for _ in sequences]
    tokens = [RNG.integers(0, V, 60) for _ in sequences]
    features = [truth.fuse(r) for r in rows]
    done = [0, 0]
    for counts in ((40, 3), (1, 5), (2, 1)):
        feeds = []
        for n, count in enumerate(counts):
            part = slice(done[n], done[n] + count)
            feeds.append(PairFeed(sequences[n], mx.array(tokens[n][part]), head.fuse(mx.array(rows[n][part]))))
            done[n] += count
        hidden, logits = slots(pairs, feeds, [1] * len(feeds))
        for n in range(2):
            own, next_features = truth(tokens[n][: done[n]], features[n][: done[n]])
            np.testing.assert_allclose(np.array(logits)[n], own[-1], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(np.array(hidden)[n], next_features[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", PARALLEL)
def test_masked_pairs_draft_several_tokens_in_one_forward(tmp_path: Path, layout: str) -> None:
    """In one forward with the true pairs, for one text or two, each with its own depth."""
    head, truth = head_of(write(tmp_path, layout)), NumpyHead(layout, EMBEDDING, OUTPUT)
    assert head.mask_feature is not None and head.depth == (5 if "speculators" in layout else 8)
    pairs = PairKVCache(head)
    sequences = [pairs.open() for _ in range(2)]
    rows = [RNG.standard_normal((60, 3 * H)).astype(np.float32) * 3 for _ in sequences]
    tokens, features, done = [RNG.integers(0, V, 60) for _ in sequences], [truth.fuse(r) for r in rows], [0, 0]
    masked = truth.fuse(truth.w["mask_hidden"].reshape(1, -1))
    for counts, depths in (((40, 3), (4, 2)), ((1, 5), (1, 5)), ((2, 0), (3, 0)), ((1, 1), (5, 5))):
        feeds, expected = [], []
        for n in (n for n in range(2) if counts[n]):
            part = slice(done[n], done[n] + counts[n])
            feeds.append(PairFeed(sequences[n], mx.array(tokens[n][part]), head.fuse(mx.array(rows[n][part]))))
            done[n] += counts[n]
            more = depths[n] - 1
            with_masks = np.concatenate([tokens[n][: done[n]], [MASK] * more]).astype(int)
            own, _ = truth(with_masks, np.concatenate([features[n][: done[n]], masked.repeat(more, axis=0)]))
            expected.append(own[-depths[n] :])
        _, logits = slots(pairs, feeds, [depth for depth in depths if depth])
        np.testing.assert_allclose(np.array(logits), np.concatenate(expected), rtol=1e-3, atol=1e-3)
        for sequence, length in zip(sequences, done, strict=True):
            sequence.roll_back(length)


@pytest.mark.parametrize("token", [None, 258])
def test_unknown_mask_token_is_refused(tmp_path: Path, token: int | None) -> None:
    folder = write(tmp_path, "SpecForge, P-EAGLE")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": token}))
    with pytest.raises(CannotDraft, match=f"has mask token {token}, but this target has 258 tokens"):
        head_of(folder)


@pytest.mark.parametrize("field", ["eagle_config", "mask_token_id", "num_depths", "rope_scaling"])
def test_field_of_another_type_is_refused(tmp_path: Path, field: str) -> None:
    folder = write(tmp_path, "SpecForge, P-EAGLE")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: "x"}))
    with pytest.raises(CannotDraft, match="a value that can't be used"):
        head_of(folder)


@pytest.mark.parametrize(
    ("layout", "target", "vocab_size", "sentence"),
    [
        ("SafeAI", {**TARGET, "hidden_size": 64}, V, "hidden_size is 48, but this one's is 64"),
        (
            "SafeAI",
            {**TARGET, "num_hidden_layers": 3},
            V,
            r"reads the target's layers \(1, 0, -1\), but this target has 3",
        ),
        ("SpecForge", {**TARGET, "num_hidden_layers": 5}, V, r"layers \(0, 3, 5\), but this target has 5"),
        ("SafeAI", TARGET, 200, "has tokens beyond this target's 200"),
        ("whole vocabulary", TARGET, 200, "has 258 tokens and this target 200"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, layout: str, target: dict[str, Any], vocab_size: int, sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        head_of(write(tmp_path, layout), target, vocab_size)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, "lacks layers.0.mlp.up_proj.weight"),
        ({"fc.weight": None}, "lacks fc.weight"),
        ({"norm.weight": np.ones(7)}, r"norm.weight is \(7,\), expected \(48,\)"),
        ({"d2t": np.zeros(3, np.int64)}, r"maps \(3,\) tokens"),
        ({"fc.scales": np.ones(3)}, "is quantised"),
        ({"fc.weight": np.ones((H, 3 * H), np.uint8), "fc.weight_scale": np.ones(H)}, "is quantised"),
        ({"fc.weight_scale": np.ones(H)}, "is quantised"),
        ({"midlayer.mlp.up_proj.bias": np.ones(40)}, "layers.0.mlp.up_proj.bias, which is not supported"),
        ({"midlayer.self_attn.sinks": np.ones(4)}, "layers.0.self_attn.sinks, which is not supported"),
        ({"norm.weight": np.full(H, np.inf, np.float32)}, "NaN or infinite"),
    ],
)
def test_incomplete_or_malformed_head_is_refused(tmp_path: Path, other: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        head_of(write(tmp_path, "SafeAI", **other))


def test_a_map_of_the_whole_vocabulary_to_itself_is_not_applied(tmp_path: Path) -> None:
    assert head_of(write(tmp_path, "whole vocabulary, mapped")).vocabulary.ids is None


def test_tensors_that_no_forward_needs_are_ignored(tmp_path: Path) -> None:
    names = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
    head_of(write(tmp_path, "SafeAI", **{name: np.ones(3, np.float32) for name in names}))


def test_files_that_a_mac_adds_on_other_file_systems_are_not_read(tmp_path: Path) -> None:
    """On exFAT or a network drive macOS keeps a file's attributes in another one, whose name begins with `._`."""
    folder = write(tmp_path, "SafeAI")
    (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7" + bytes(4092))
    head_of(folder)


def test_invalid_head_folder_is_refused(tmp_path: Path) -> None:
    (write(tmp_path, "SafeAI") / "model.safetensors").unlink()
    with pytest.raises(CannotDraft, match=r"has no tensors \* in .safetensors files; use the original repository"):
        head_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CannotDraft, match="download the head again"):
        head_of(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in ([], {"weight_map": []}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=f"{index} holds list|{index} has a weight_map|download the head again"):
            head_of(tmp_path)
    index.unlink()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(1)})
    with pytest.raises(CannotDraft, match="not a head of kind eagle3"):
        head_of(tmp_path)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    """Rows beyond 65,504 are usual in targets; bfloat16 and float32 hold them, float16 does not."""
    from tests.drafters.eagle3_heads import weights_of

    halves = {key: value.astype(np.float16) for key, value in weights_of().items() if value.dtype == np.float32}
    head = head_of(write(tmp_path, "SafeAI", **halves))
    assert head.fc.weight.dtype == mx.float32
    assert mx.isfinite(head.fuse(mx.full((1, 3 * H), 1e5))).all()
