"""Random MTP heads with the tensor names of their original repositories, and their forward in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.engine.loading import LoadedModel
from tests.drafters.experts import gated_mlp, softmax_moe

Array = np.ndarray[Any, np.dtype[Any]]
H, HEADS, KV, INNER = 64, 4, 2, 128
MOE = ("qwen3_5_moe", "qwen3_next")
MIMO = {"model_type": "mimo", "num_nextn_predict_layers": 1, "head_dim": 16}
_QWEN = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
NAMES = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
}


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def weights_of(family: str, seed: int = 0) -> dict[str, Array]:
    """Random weights, as the original repository has them."""
    draws = np.random.default_rng(seed)
    prefix, of_token, of_row, fuse, last, layer = NAMES[family]
    gated, dim = family != "mimo", 16

    def matrix(rows: int, columns: int) -> Array:
        return (draws.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def gains(count: int) -> Array:
        return (0.3 * draws.standard_normal(count) + (0 if gated else 1)).astype(np.float32)

    found = {f"{name}.weight": gains(H) for name in (of_token, of_row, last)} | {f"{fuse}.weight": matrix(H, 2 * H)}
    found |= {f"{layer}{name}.weight": gains(H) for name in ("input_layernorm", "post_attention_layernorm")}
    for key, rows in {"q": HEADS * dim * (1 + gated), "k": KV * dim, "v": KV * dim, "o": H}.items():
        found[f"{layer}self_attn.{key}_proj.weight"] = matrix(rows, H)
        if not gated and key != "o":
            found[f"{layer}self_attn.{key}_proj.bias"] = gains(rows)
    if gated:
        found |= {f"{layer}self_attn.{key}_norm.weight": gains(dim) for key in "qk"}
    experts = [f"experts.{number}." for number in range(4)] + ["shared_expert."] if family in MOE else [""]
    for at in experts:
        inner = 32 if at else INNER
        for key, shape in {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}.items():
            found[f"{layer}mlp.{at}{key}_proj.weight"] = matrix(*shape)
    if family in MOE:
        found |= {f"{layer}mlp.gate.weight": matrix(4, H), f"{layer}mlp.shared_expert_gate.weight": matrix(1, H)}
    return {prefix + key: value for key, value in found.items()}


def stack_experts(weights: dict[str, Array]) -> dict[str, Array]:
    """The same weights with all experts in one tensor, as Qwen3.5 has them."""
    at = "mtp.layers.0.mlp.experts."

    def of(number: int, name: str) -> Array:
        return weights[f"{at}{number}.{name}_proj.weight"]

    both = [np.concatenate([of(number, "gate"), of(number, "up")]) for number in range(4)]
    others = {key: value for key, value in weights.items() if not key.startswith(at)}
    down = np.stack([of(number, "down") for number in range(4)])
    return others | {f"{at}gate_up_proj": np.stack(both), f"{at}down_proj": down}


def by_numpy(family: str, target: LoadedModel, tokens: Array, rows: Array) -> tuple[Array, Array]:
    """Logits [T, V] and the vectors that replace the next rows [T, H], over all pairs at once."""
    prefix, of_token, of_row, fuse, last, layer = NAMES[family]
    w = {key.removeprefix(prefix).removesuffix(".weight"): v for key, v in weights_of(family).items()}
    gated, dim = family != "mimo", 16

    def norm(x: Array, name: str) -> Array:
        gain = w[name] + gated
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain

    inner = getattr(target.model, "language_model", target.model)
    embedded = norm(np.array(inner.model.embed_tokens(mx.array(tokens))), of_token)
    seen = norm(rows, of_row)
    x = np.concatenate([embedded, seen] if gated else [seen, embedded], axis=-1) @ w[fuse].T
    y = norm(x, f"{layer}input_layernorm")

    def heads(key: str, count: int) -> Array:
        z = y @ w[f"{layer}self_attn.{key}_proj"].T + w.get(f"{layer}self_attn.{key}_proj.bias", 0)
        return z.reshape(len(y), count, -1)

    queries, keys, values = heads("q", HEADS), heads("k", KV), heads("v", KV)
    gate = np.ones(1)
    if gated:
        queries, gate = np.split(queries, 2, axis=-1)
        gate = 1 / (1 + np.exp(-gate.reshape(len(y), -1)))
        queries, keys = norm(queries, f"{layer}self_attn.q_norm"), norm(keys, f"{layer}self_attn.k_norm")
    queries, keys = (apply_rope(z.swapaxes(0, 1), dim // 2 if gated else dim) for z in (queries, keys))
    keys, values = keys.repeat(HEADS // KV, axis=0), values.swapaxes(0, 1).repeat(HEADS // KV, axis=0)
    scores = np.where(np.tri(len(y), dtype=bool), queries @ keys.swapaxes(1, 2) / dim**0.5, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ values
    h = x + (mixed.swapaxes(0, 1).reshape(len(y), -1) * gate) @ w[f"{layer}self_attn.o_proj"].T
    y = norm(h, f"{layer}post_attention_layernorm")
    h = h + (softmax_moe(w, f"{layer}mlp.", y, 2) if family in MOE else gated_mlp(w, f"{layer}mlp.", y))
    out = norm(h, last)
    tied = "lm_head" not in inner
    logits = inner.model.embed_tokens.as_linear(mx.array(out)) if tied else inner.lm_head(mx.array(out))
    return np.array(logits), out


def apply_rope(x: Array, width: int) -> Array:
    half = width // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:width], x[..., width:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), rest], axis=-1
    )


def model_of(tiny_model: Callable[..., Path], family: str) -> Path:
    if family == "qwen3_5_moe":
        return tiny_model("qwen3_5", model_type=family, **EXPERTS)
    return tiny_model("llama", **MIMO) if family == "mimo" else tiny_model(family)


def write_head(folder: Path, family: str, **other: Any) -> Path:
    """Writes the family's head as `write` does. `other` weights replace its own; those that are None are left out."""
    weights = {**(stack_experts(weights_of(family)) if family == "qwen3_5_moe" else weights_of(family)), **other}
    return write(folder, weights)


def write(folder: Path, weights: dict[str, Any]) -> Path:
    """Writes two shards, as in the original repositories, of which the second has these weights."""
    arrays = {key: mx.array(value) for key, value in weights.items() if value is not None}
    mx.save_safetensors(str(folder / "model-00002.safetensors"), arrays)
    mx.save_safetensors(str(folder / "model-00001.safetensors"), {"model.embed_tokens.weight": mx.zeros((2, 2))})
    places = dict.fromkeys(arrays, "model-00002.safetensors") | {"model.embed_tokens.weight": "model-00001.safetensors"}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
