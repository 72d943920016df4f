"""Tiny random models in Hugging Face layout, one per family, with a byte-level tokenizer. No network, no torch.

The weights are scaled so that logits are far from flat, depend on the whole text, and greedy text doesn't fall into a
short loop: an error of one position or one branch changes the tokens. Uses mlx-lm's model classes, and none of ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from tests.harness.tiny_models import write_tokenizer

VOCAB_SIZE = 258  # 0 ends the text, 1 pads, then the 256 bytes

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "num_global_key_value_heads": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_scaling": _LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite": {
        "model_type": "granite",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.0,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE},
    "internlm3": {"model_type": "internlm3", "bias": True, "qkv_bias": True},
    "mimo": {"model_type": "mimo", "tie_word_embeddings": False},
    "nanbeige": {"model_type": "nanbeige"},
    "seed_oss": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": True,
        "tie_word_embeddings": False,
    },
    "phi3": {"model_type": "phi3", "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
    },
    "gemma4_text": {"model_type": "gemma4_text", **_GEMMA4},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **_LINEAR,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 32,
        **_MOE,
        **_LINEAR,
    },
}
HYBRIDS = ("qwen3_5", "qwen3_next")
"""Families with a recurrent state, in which no position can be masked out."""

_ONE_PLUS = ("gemma2", "gemma3_text")  # their norms multiply by 1 + weight
_EMBED_SCALED = ("gemma2", "gemma3_text", "gemma4_text")  # they multiply embeddings by sqrt(hidden)


@dataclass(frozen=True, slots=True)
class Pair:
    """The folders of two models with the same tokenizer."""

    target: Path
    draft: Path


def write_model(
    path: Path,
    family: str,
    seed: int = 0,
    *,
    scale: float = 4.0,
    noise: float = 0.0,
    noise_seed: int = 1,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Writes a random model of `family` to `path`.

    `scale` is about the logits' standard deviation. `noise` mixes that share of a second random draw into every
    weight: the same seed with and without noise makes a target and a draft that often agree. `config` overrides
    config.json. The same arguments give the same weights everywhere.
    """
    from mlx_lm.utils import _get_classes  # takes a second, also for modules that import only constants from here

    settings = {**BASE, **FAMILIES[family], **config}
    model_class, args_class = _get_classes(settings)
    mx.random.seed(seed)  # a recurrent layer draws its decay when it is made
    model = model_class(args_class.from_dict(settings))
    rng, noise_rng = np.random.default_rng([seed, 7]), np.random.default_rng([seed, noise_seed, 8])
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        normal = rng.standard_normal(value.shape)
        if noise:
            normal = np.sqrt(1 - noise**2) * normal + noise * noise_rng.standard_normal(value.shape)
        drawn = _weight(name, value, normal, family, scale, settings)
        weights[name] = drawn.astype(getattr(mx, dtype))
    model.update(tree_unflatten(list(weights.items())))
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    write_tokenizer(path)
    return path


def _weight(
    name: str, value: mx.array, normal: np.ndarray, family: str, scale: float, settings: dict[str, Any]
) -> mx.array:
    """Scales a random weight. Gains above 1 make logits depend on the whole context, so greedy text does not loop."""
    hidden = settings["hidden_size"]
    embed_std = hidden**-0.5 if family in _EMBED_SCALED else 0.5  # small, so that the layers' output dominates
    last = name.rsplit(".", 2)
    if name.endswith(("A_log", "dt_bias", "layer_scalar")):
        return value
    if "norm" in last[-2] and name.endswith("model.norm.weight"):
        # Random signs: with tied embeddings a model would otherwise mostly repeat its last token.
        head_std = embed_std if settings["tie_word_embeddings"] else hidden**-0.5
        drawn = normal * scale / (head_std * hidden**0.5)
        return mx.array(drawn - 1.0 if family in _ONE_PLUS else drawn)
    if last[-2] in ("q_norm", "k_norm"):
        return mx.array(0.2 * normal + (0.4 if family in _ONE_PLUS else 1.4))
    if "norm" in last[-2]:
        return mx.array(0.2 * normal + (0.0 if family in _ONE_PLUS else 1.0))
    if "embed_tokens" in name:
        return mx.array(normal * embed_std)
    if value.ndim == 1:
        return mx.array(0.1 * normal)
    fan_in = value.shape[1] if "conv1d" in name else value.shape[-1]
    gain = 1.0 if "lm_head" in name else 1.5
    return mx.array(normal * gain * fan_in**-0.5)
