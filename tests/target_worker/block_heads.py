"""Block heads, such as DFlash, for the target of `heads`: random ones, and some constructed to predict its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.heads import eagle3
from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.dflash import DFlash, build
from outrider.drafters.heads.eagle3 import Eagle3
from outrider.engine.loading import LoadedModel
from tests.target_worker.heads import LAYERS, H
from tests.tiny import VOCAB_SIZE

Array = np.ndarray[Any, np.dtype[Any]]
MASK, BLOCK, RANK = 200, 5, 8
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": H,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-5,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1, 2],
}


def block_head(target: LoadedModel, **config: Any) -> DFlash:
    """A random DFlash head."""
    return _build(_random(0), target, **config)


def linked_head(target: LoadedModel) -> DFlash:
    """A random DSpark head. The last token's own row drafts the first."""
    draws = np.random.default_rng(1)
    sizes = {"markov_w1.weight": (VOCAB_SIZE, RANK), "markov_w2.weight": (VOCAB_SIZE, RANK)}
    weights = _random(1) | {f"markov_head.{key}": draws.standard_normal(shape) for key, shape in sizes.items()}
    return _build(weights, target, architectures=["Qwen3DSparkModel"], markov_rank=RANK)


def gated_head(target: LoadedModel) -> DFlash:
    """A random head with a gated Markov head."""
    draws = np.random.default_rng(4)
    sizes = {"markov_w1.weight": (VOCAB_SIZE, RANK), "markov_w2.weight": (VOCAB_SIZE, RANK)}
    sizes |= {"gate_proj.weight": (RANK, RANK + H), "gate_proj.bias": (RANK,)}
    weights = _random(4) | {f"markov_head.{key}": draws.standard_normal(shape) for key, shape in sizes.items()}
    return _build(weights, target, projector_type="dspark", markov_rank=RANK, markov_head_type="gated", block_size=9)


def convolving_head(target: LoadedModel) -> DFlash:
    """A random DFlash 2 head, with convolutions and a sliding window."""
    draws, weights = np.random.default_rng(2), _random(2)
    for part in ("attention_conv", "mlp_conv"):
        weights[f"layers.0.{part}.base_kernel"] = draws.standard_normal((2, 2, H))
        weights[f"layers.0.{part}.kernel_projection.weight"] = 0.1 * draws.standard_normal((16, H))
    for part in ("predecessor", "successor"):
        weights[f"candidate_selector.{part}_codebook"] = draws.standard_normal((VOCAB_SIZE, RANK))
    weights["candidate_selector.hidden_projection.weight"] = 0.1 * draws.standard_normal((RANK, H))
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "is_causal": False}
    return _build(weights, target, **own, layer_types=["sliding_attention"], sliding_window=8)


def block_feature_head(target: LoadedModel, **config: Any) -> DFlash:
    """Predicts the token after the last one from the target's row before it alone.

    The last token's own row attends equally to all within its window: the last feature and the block's beginning. The
    feature is by far the larger of these, and the layer's MLP looks up its token.
    """
    logits = np.array(target.model(mx.arange(VOCAB_SIZE)[:, None])[:, 0])
    table = np.array(target.model.model.embed_tokens(mx.arange(VOCAB_SIZE)))
    known = table / np.linalg.norm(table, axis=-1, keepdims=True)
    weights = {key: np.zeros(shape) for key, shape in _shapes(VOCAB_SIZE).items()}
    weights |= {key: np.ones(shape) for key, shape in _shapes(VOCAB_SIZE).items() if len(shape) == 1}
    weights["fc.weight"] = np.concatenate([np.zeros((H, 2 * H)), np.eye(H)], axis=1)
    weights["hidden_norm.weight"] *= 1e4
    weights |= {f"layers.0.self_attn.{key}_proj.weight": np.eye(H) for key in "vo"}
    weights |= {f"layers.0.mlp.{key}_proj.weight": known for key in ("gate", "up")}
    weights["layers.0.mlp.down_proj.weight"] = 1e6 * known[logits.argmax(axis=-1)].T
    weights["norm.weight"] = np.array(target.model.model.norm.weight)
    window = {"layer_types": ["sliding_attention"], "sliding_window": 2, "intermediate_size": VOCAB_SIZE}
    return _build(weights, target, **{**window, "sample_from_anchor": True, **config})


def block_token_head(target: LoadedModel) -> DFlash:
    """Predicts the token after each given one from that token alone, as the target does. Masks predict nothing."""
    weights = {key: np.zeros(shape) + (len(shape) == 1) for key, shape in _shapes(32).items()}
    weights["norm.weight"] = np.array(target.model.model.norm.weight)
    return _build(weights, target, block_size=9, sample_from_anchor=True)


def parallel_head(target: LoadedModel) -> Eagle3:
    """A random P-EAGLE head."""
    draws = np.random.default_rng(3)
    config = {**CONFIG, "architectures": ["PEagleDraftModel"], "vocab_size": VOCAB_SIZE, "num_depths": BLOCK}
    config |= {"intermediate_size": 32, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    shapes = {f"self_attn.{key}_proj.weight": (H, 2 * H) for key in "qkv"} | {"self_attn.o_proj.weight": (H, H)}
    shapes |= {"mlp.gate_proj.weight": (32, H), "mlp.up_proj.weight": (32, H), "mlp.down_proj.weight": (H, 32)}
    shapes |= {f"{name}.weight": (H,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes = {f"layers.0.{key}": shape for key, shape in shapes.items()}
    shapes |= {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VOCAB_SIZE, H)}
    shapes |= {"mask_hidden": (1, 1, 3 * H)}
    weights = {key: mx.array(draws.standard_normal(shape).astype(np.float32)) for key, shape in shapes.items()}
    return eagle3.build(HeadCheckpoint(config, weights, HeadTarget.of(target)))


def _shapes(inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    shapes |= {f"layers.0.self_attn.{key}_proj.weight": (H, H) for key in "qkvo"}
    shapes |= {f"layers.0.self_attn.{key}_norm.weight": (16,) for key in "qk"}
    shapes |= {f"layers.0.{name}.weight": (H,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"layers.0.mlp.{key}_proj.weight": (inner, H) for key in ("gate", "up")}
    return shapes | {"layers.0.mlp.down_proj.weight": (H, inner)}


def _random(seed: int) -> dict[str, Array]:
    draws = np.random.default_rng(seed)
    return {key: draws.standard_normal(shape) * 0.3 + (len(shape) == 1) for key, shape in _shapes(32).items()}


def write_block_head(folder: Path, **config: Any) -> Path:
    """Writes `block_head` as a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"intermediate_size": 32, **CONFIG, **config}))
    arrays = {key: mx.array(value.astype(np.float32)) for key, value in _random(0).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def _build(weights: dict[str, Array], target: LoadedModel, **config: Any) -> DFlash:
    arrays = {key: mx.array(value.astype(np.float32)) for key, value in weights.items()}
    return build(HeadCheckpoint({"intermediate_size": 32, **CONFIG, **config}, arrays, HeadTarget.of(target)))
