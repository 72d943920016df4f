"""Random heads of DeepSeek's and GLM's models, stored as an additional layer, and their forward in numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from outrider.engine.loading import LoadedModel
from tests.drafters.experts import grouped_moe, latent_attention, rms

Array = np.ndarray[Any, np.dtype[Any]]
H, HEADS, KV, DIM, INNER, EXPERTS = 64, 4, 2, 16, 32, 4
NOPE, ROPE, VALUE, RANK, Q_RANK = 16, 8, 12, 20, 24
LAYERS = 3
_MOE = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "num_key_value_heads": HEADS,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"model_type": "deepseek_v3", **_MOE, **_LATENT, "n_group": 2},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_MOE,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_MOE, **_LATENT},
}
PREFIX = f"model.layers.{LAYERS}."


def weights_of(family: str, target: LoadedModel) -> dict[str, Array]:
    """Random weights, as the original repository has them."""
    draws = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> Array:
        return (draws.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def gains(count: int) -> Array:
        return (1 + 0.3 * draws.standard_normal(count)).astype(np.float32)

    names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    found = {f"{name}.weight": gains(H) for name in names} | {"eh_proj.weight": matrix(H, 2 * H)}
    found["embed_tokens.weight"] = np.array(target.model.model.embed_tokens.weight)
    found["shared_head.head.weight"] = np.array(target.model.lm_head.weight)
    if family == "glm4_moe":
        for key, (rows, columns) in {
            "q": (HEADS * DIM, H), "k": (KV * DIM, H), "v": (KV * DIM, H), "o": (H, HEADS * DIM)
        }.items():  # fmt: skip
            found[f"self_attn.{key}_proj.weight"] = matrix(rows, columns)
            if key != "o":
                found[f"self_attn.{key}_proj.bias"] = 0.2 * gains(rows)
        found |= {f"self_attn.{key}_norm.weight": gains(DIM) for key in "qk"}
    else:
        shapes = {
            "q_a_proj": (Q_RANK, H),
            "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
            "kv_a_proj_with_mqa": (RANK + ROPE, H),
            "kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
            "o_proj": (H, HEADS * VALUE),
        }
        found |= {f"self_attn.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found |= {"self_attn.q_a_layernorm.weight": gains(Q_RANK), "self_attn.kv_a_layernorm.weight": gains(RANK)}
    found |= {"mlp.gate.weight": matrix(EXPERTS, H), "mlp.gate.e_score_correction_bias": 0.3 * gains(EXPERTS) - 0.3}
    for at in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        for key, (rows, columns) in {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}.items():
            found[f"mlp.{at}.{key}_proj.weight"] = matrix(rows, columns)
    return {PREFIX + key: value for key, value in found.items()}


def by_numpy(family: str, target: LoadedModel, tokens: Array, rows: Array) -> tuple[Array, Array]:
    """Logits [T, V] and the vectors that replace the next rows [T, H], over all pairs at once."""
    weights = weights_of(family, target)
    w = {key.removeprefix(PREFIX).removesuffix(".weight"): value for key, value in weights.items()}
    embedded = rms(w["embed_tokens"][tokens], w["enorm"])
    x = np.concatenate([embedded, rms(rows, w["hnorm"])], axis=-1) @ w["eh_proj"].T
    y = rms(x, w["input_layernorm"])
    attention = {key.removeprefix("self_attn."): value for key, value in w.items() if key.startswith("self_attn.")}
    if family == "glm4_moe":
        h = x + _attention(attention, y)
    else:
        inner = 1e-6 if family == "deepseek_v3" else 1e-5
        h = x + latent_attention(attention, y, HEADS, NOPE, ROPE, 10000.0, inner)
    config = MODELS[family]
    out = h + grouped_moe(w, "mlp.", rms(h, w["post_attention_layernorm"]), 2, config["n_group"], 1, 1.5)
    normed = rms(out, w["shared_head.norm"])
    return normed @ w["shared_head.head"].T, normed


def _attention(w: dict[str, Array], x: Array) -> Array:
    def heads(key: str, count: int) -> Array:
        y = (x @ w[f"{key}_proj"].T + w[f"{key}_proj.bias"]).reshape(len(x), count, DIM).swapaxes(0, 1)
        return y if key == "v" else _apply_rope(rms(y, w[f"{key}_norm"]))

    queries, keys, values = heads("q", HEADS), heads("k", KV), heads("v", KV)
    keys, values = keys.repeat(HEADS // KV, axis=0), values.repeat(HEADS // KV, axis=0)
    scores = np.where(np.tri(len(x), dtype=bool), queries @ keys.swapaxes(1, 2) / DIM**0.5, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = (shares / shares.sum(axis=-1, keepdims=True)) @ values
    joint: Array = found.swapaxes(0, 1).reshape(len(x), -1) @ w["o_proj"].T
    return joint


def _apply_rope(x: Array) -> Array:
    """Rotates the first half of each head's channels."""
    from tests.drafters.mtp_heads import apply_rope

    return apply_rope(x, DIM // 2)


def in_fp8(weights: dict[str, Array], key: str) -> dict[str, mx.array]:
    """Returns a tensor in float8 with a scale, as DeepSeek publishes it, and rounds `weights` to its values."""
    small = mx.to_fp8(mx.array(weights[key] * 2))
    weights[key] = np.array(mx.from_fp8(small, dtype=mx.float32)) / 2
    return {key: small, f"{key}_scale_inv": mx.array([[0.5]])}
