"""ReDrafter heads equal an independent forward, recurrent or not; others are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.pair_kv_cache import PairKVCache
from outrider.drafters.heads.redrafter import Redrafter, build
from outrider.engine.hidden_states import AFTER_NORM
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.errors import CannotDraft
from tests.drafters.pair_feeds import PairFeed, slots
from tests.tiny import write_model

H, V = 64, 250  # the target's logits are padded to 258
Array = np.ndarray[Any, np.dtype[Any]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "rnn": {"exit_dim": 96, "num_draft_layers": 2, "rnn": True, "emb_norm": True},
    "no rnn": {"exit_dim": 2 * H, "num_draft_layers": 1, "rnn": False},
    "no blocks": {"exit_dim": 2 * H, "num_draft_layers": 0, "rnn": True},
}


def read(folder: Path, target: LoadedModel) -> Redrafter:
    return build(HeadCheckpoint.read(folder, HeadTarget.of(target)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("target"), "llama"))


def weights_of(layout: str) -> dict[str, Array]:
    """Random weights, as a checkpoint has them."""
    config, draws = LAYOUTS[layout], np.random.default_rng(3)
    width, blocks = config["exit_dim"], config["num_draft_layers"]

    def matrix(rows: int, columns: int) -> Array:
        return (draws.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    found = {f"lm_head.{blocks}.weight": matrix(V, width)}
    for number in range(blocks):
        found[f"lm_head.{number}.linear.weight"] = matrix(width, width)
        found[f"lm_head.{number}.linear.bias"] = matrix(1, width)[0]
    if width != 2 * H:
        found |= {"input_proj.weight": matrix(width, 2 * H), "input_proj.bias": matrix(1, width)[0]}
    if config["rnn"]:
        found |= {"rnn_u.weight": matrix(H, H), "rnn_u.bias": matrix(1, H)[0], "rnn_w.weight": matrix(H, H)}
    if config.get("emb_norm"):
        found["emb_norm.weight"] = matrix(1, H)[0]
    return found


def write_checkpoint(folder: Path, layout: str, config: dict[str, Any] | None = None, **other: Any) -> Path:
    """Writes a checkpoint. `other` weights replace its own; those that are None are left out."""
    sizes = {"model_type": "recurrent_drafting_drafter", "hidden_size": H, "vocab_size": V}
    (folder / "config.json").write_text(json.dumps({**sizes, **LAYOUTS[layout], **(config or {})}))
    weights = {**weights_of(layout), **other}
    arrays = {key: mx.array(value) for key, value in weights.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def by_numpy(layout: str, table: Array, row: Array, tokens: Array) -> Array:
    """Logits after each token of a chain, of which the first is committed: [T, V]."""
    config, w, state, found = LAYOUTS[layout], weights_of(layout), np.zeros(H), []
    for token in tokens:
        moved = table[token] @ w["rnn_w.weight"].T + w["rnn_u.weight"] @ state + w["rnn_u.bias"] if config["rnn"] else 0
        state = _silu(moved) if config["rnn"] else state + table[token]
        x = np.concatenate([row, state])
        x = w["input_proj.weight"] @ x + w["input_proj.bias"] if "input_proj.weight" in w else x
        for number in range(config["num_draft_layers"]):
            x = x + _silu(w[f"lm_head.{number}.linear.weight"] @ x + w[f"lm_head.{number}.linear.bias"])
        found.append(w[f"lm_head.{config['num_draft_layers']}.weight"] @ x)
    return np.array(found)


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_equals_an_independent_forward(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    """For two chains in one forward, token by token; tokens outside its vocabulary get -inf."""
    head, draws = read(write_checkpoint(tmp_path, layout), target), np.random.default_rng(1)
    assert head.points == (AFTER_NORM,) and head.reach == 1 and head.bytes_per_pair == 0
    table = np.array(target.model.model.embed_tokens(mx.arange(258)))
    rows, tokens = draws.standard_normal((2, H)).astype(np.float32), draws.integers(0, V, (2, 5))
    truth = [by_numpy(layout, table, row, chain) for row, chain in zip(rows, tokens, strict=True)]
    pairs, features = PairKVCache(head), head.fuse(mx.array(rows))
    sequences = [pairs.open() for _ in rows]
    for depth in range(5):
        feeds = [PairFeed(sequences[n], mx.array(tokens[n, depth : depth + 1]), features[n : n + 1]) for n in range(2)]
        hidden, slot_logits = slots(pairs, feeds, [1, 1])
        features, logits = hidden, np.array(slot_logits)
        assert logits.shape == (2, 258) and np.isneginf(logits[:, V:]).all()
        for n in range(2):
            np.testing.assert_allclose(logits[n, :V], truth[n][depth], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "other", "sentence"),
    [
        ({"hidden_size": 48}, {}, "hidden_size is 48, but this one's is 64"),
        ({"vocab_size": 300}, {}, "has 300 tokens and this target 258"),
        ({"exit_dim": 80}, {}, r"input_proj.weight is \(96, 128\), expected \(80, 128\)"),
        ({"exit_dim": None}, {}, "expected a head's sizes"),
        ({"model_type": "llama"}, {}, "is not a head of kind redrafter"),
        ({"quantization": {"bits": 4}}, {}, "is quantised"),
        ({}, {"rnn_u.bias": None}, "lacks rnn_u.bias"),
        ({}, {"rnn_u.bias": np.full(H, np.inf)}, "NaN or infinite"),
    ],
)
def test_unusable_head_is_refused_with_a_reason(
    target: LoadedModel, tmp_path: Path, config: dict[str, Any], other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        read(write_checkpoint(tmp_path, "rnn", config, **other), target)


def test_saved_weights_can_be_read_again(target: LoadedModel, tmp_path: Path) -> None:
    head: Redrafter = read(write_checkpoint(tmp_path, "no rnn"), target)
    head.save_weights(str(tmp_path / "model.safetensors"))
    again = read(tmp_path, target)
    x = mx.ones((1, 2 * H))
    assert mx.array_equal(head.logits(x), again.logits(x))
