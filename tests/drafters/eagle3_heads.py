"""Random EAGLE-3 heads in each published layout, with an independent forward in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
H, HEADS, KV_HEADS, DIM, INNER, V, V_D, LAYERS = 48, 4, 2, 12, 40, 258, 90, 8
TARGET = {"hidden_size": H, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
EPS, THETA = 1e-5, 5000.0

_SIZES = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": INNER,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "model_type": "llama",
}
OFFICIAL = {**_SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": V_D}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": V_D,
    "transformer_layer_config": _SIZES,
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (config, arguments of `weights_of`)
    "SafeAI": (OFFICIAL, {}),
    "SpecForge": ({**OFFICIAL, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}, {"embeds": True}),
    "SpecForge 3.1": ({**OFFICIAL, "norm_output": True}, {"fc_norm": True, "prefix": "model."}),
    "speculators": (
        {**SPECULATORS, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 7]},
        {"name": "layers.0.", "embeds": True},
    ),
    "speculators, deeper": (
        {**SPECULATORS, "norm_before_fc": True},
        {"name": "layers.0.", "input_norm": True, "layers": 2, "qk_norm": True, "biases": "qkvo"},
    ),
    "SafeAI, official": ({**OFFICIAL, "architectures": ["LlamaForCausalLM"]}, {}),
    "NVIDIA": (
        {
            **OFFICIAL,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [],
                "norm_before_fc": True,
                "return_hidden_post_norm": True,
            },
        },
        {"input_norm": True},
    ),
    "NVIDIA, late layers": (
        {
            **OFFICIAL,
            "draft_vocab_size": V,
            "eagle_aux_hidden_state_layer_ids": [4, 6, 8],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, 8], "use_aux_hidden_state": True},
        },
        {"vocab": V, "d2t": False, "output": False},
    ),
    "NVIDIA, last row": (
        {**OFFICIAL, "draft_vocab_size": V, "eagle_config": {"use_aux_hidden_state": False}},
        {"vocab": V, "d2t": False, "output": False, "taps": 0},
    ),
    "Qwen2's biases": (OFFICIAL, {"biases": "qkv"}),
    "NVIDIA, deeper": (OFFICIAL, {"name": "layers.0.", "layers": 3, "hidden_norms": True}),
    "DeepSpec": (
        {
            **_SIZES,
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"],
            "target_layer_ids": [0, 2, 3, 5, 7],
        },
        {"name": "layers.0.", "embeds": True, "qk_norm": True, "vocab": V, "d2t": False, "taps": 5},
    ),
    "speculators, windows": (
        {
            **SPECULATORS,
            "transformer_layer_config": {
                **_SIZES,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 7,
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
        {"name": "layers.0.", "layers": 2},
    ),
    "speculators, partial rotation": (
        {
            **SPECULATORS,
            "transformer_layer_config": {
                **{key: value for key, value in _SIZES.items() if key != "rope_theta"},
                "rope_parameters": {
                    "rope_theta": THETA,
                    "rope_type": "default",
                    "mrope_section": [1, 1, 1],
                    "partial_rotary_factor": 0.5,
                },
            },
        },
        {"name": "layers.0."},
    ),
    "whole vocabulary": ({**OFFICIAL, "draft_vocab_size": V}, {"vocab": V, "d2t": False}),
    "whole vocabulary, mapped": ({**OFFICIAL, "draft_vocab_size": V}, {"vocab": V}),
}
MASK = 257
PARALLEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SpecForge, P-EAGLE": (
        {**_SIZES, "architectures": ["PEagleDraftModel"], "draft_vocab_size": V_D, "mask_token_id": MASK},
        {"name": "layers.0.", "embeds": True, "layers": 3, "masks": True},
    ),
    "speculators, P-EAGLE": (
        {
            **SPECULATORS,
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "norm_before_residual": True,
            "mask_token_id": MASK,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
        },
        {"name": "layers.0.", "embeds": True, "layers": 2, "input_norm": True, "masks": True},
    ),
}
PARALLEL["vLLM, P-EAGLE"] = (
    {**_SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": V_D, "ptd_token_id": MASK},
    {"name": "layers.0.", "embeds": True, "layers": 2, "masks": True, "flat": True},
)
LAYOUTS |= PARALLEL
TAPS: dict[str, tuple[int, ...]] = {
    "SpecForge": (0, 3, 5),
    "speculators": (1, 3, 6),
    "DeepSpec": (0, 2, 3, 5, 7),
    "NVIDIA, late layers": (3, 5, 7),
    "NVIDIA, last row": (),
}
OFFICIAL_TAPS = (1, LAYERS // 2 - 1, LAYERS - 4)


def weights_of(
    seed: int = 0,
    *,
    name: str = "midlayer.",
    prefix: str = "",
    embeds: bool = False,
    fc_norm: bool = False,
    input_norm: bool = False,
    qk_norm: bool = False,
    biases: str = "",
    layers: int = 1,
    vocab: int = V_D,
    d2t: bool = True,
    masks: bool = False,
    flat: bool = False,
    taps: int = 3,
    output: bool = True,
    hidden_norms: bool = False,
) -> dict[str, Array]:
    """Random weights, as a checkpoint has them."""
    draws = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (draws.standard_normal((rows, columns)) * 1.3 / columns**0.5).astype(np.float32)

    def gains(count: int) -> Array:
        return (1 + 0.3 * draws.standard_normal(count)).astype(np.float32)

    found: dict[str, Array] = {
        "fc.weight": matrix(H, taps * H),
        "norm.weight": gains(H),
        "lm_head.weight": matrix(vocab, H),
    }
    if not taps:
        del found["fc.weight"]
    if not output:
        del found["lm_head.weight"]
    if embeds:
        found["embed_tokens.weight"] = matrix(V, H)
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": gains(H) for i in range(3)}
    if input_norm:
        found["input_norm.weight"] = gains(3 * H)
    for number in range(layers):
        at = name if number == 0 else f"layers.{number}."
        width = 2 * H if number == 0 else H
        first = "hidden_norm" if number and hidden_norms else "input_layernorm"
        for norm in (first, "post_attention_layernorm", *(["hidden_norm"] if number == 0 else [])):
            found[f"{at}{norm}.weight"] = gains(H)
        shapes = {"q": (HEADS * DIM, width), "k": (KV_HEADS * DIM, width), "v": (KV_HEADS * DIM, width), "o": (H, H)}
        for key, shape in shapes.items():
            found[f"{at}self_attn.{key}_proj.weight"] = matrix(*shape)
            if key in biases:
                found[f"{at}self_attn.{key}_proj.bias"] = 0.2 * gains(shape[0])
        if qk_norm:
            found |= {f"{at}self_attn.{key}_norm.weight": gains(DIM) for key in "qk"}
        for key, shape in {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}.items():
            found[f"{at}mlp.{key}_proj.weight"] = matrix(*shape)
    if masks:
        found["mask_hidden"] = 2 * (matrix(1, 3 * H) if flat else matrix(1, 3 * H)[None])
    if d2t:
        ids = np.sort(draws.permutation(V)[:vocab])
        found["d2t"] = (ids - np.arange(vocab)).astype(np.int64)
        found["t2d"] = np.isin(np.arange(V), ids)
    return {prefix + key if "d2t" not in key and "t2d" not in key else key: value for key, value in found.items()}


def write(folder: Path, layout: str, seed: int = 0, **other: Any) -> Path:
    """Writes a checkpoint of this layout. `other` weights replace its own; those that are None are left out."""
    config, kind = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {**weights_of(seed, **kind), **other}
    arrays = {key: mx.array(value) for key, value in weights.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


class NumpyHead:
    """The forward of a published head, by the papers' formulas, over all pairs at once and without a cache."""

    def __init__(self, layout: str, embedding: Array, output: Array, seed: int = 0) -> None:
        self.config, kind = LAYOUTS[layout]
        weights = weights_of(seed, **kind)
        self.w = {key.removeprefix("model.").replace("midlayer.", "layers.0."): v for key, v in weights.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.output = self.w.get("lm_head.weight", output)
        self.layers, sizes = kind.get("layers", 1), self.config.get("transformer_layer_config", self.config)
        slides = [kind == "sliding_attention" for kind in sizes.get("layer_types", [""] * self.layers)]
        self.windows = [sizes["sliding_window"] if slide else 1000 for slide in slides]
        self.activate = _gelu if "hidden_act" in sizes else _silu
        self.rotary = int(DIM * sizes.get("rope_parameters", {}).get("partial_rotary_factor", 1))

    def fuse(self, rows: Array) -> Array:
        if "fc_norm.0.weight" in self.w:
            parts = np.split(rows, 3, axis=-1)
            rows = np.concatenate([_norm(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], axis=-1)
        if "input_norm.weight" in self.w:
            rows = _norm(rows, self.w["input_norm.weight"])
        return rows @ self.w["fc.weight"].T if "fc.weight" in self.w else rows

    def __call__(self, tokens: Array, features: Array) -> tuple[Array, Array]:
        """Logits over the target's vocabulary, and the vectors that replace the next features: [T, V], [T, H]."""
        x = features
        for number in range(self.layers):
            w = {k.removeprefix(f"layers.{number}."): v for k, v in self.w.items() if k.startswith(f"layers.{number}.")}
            residual = x
            seen = _norm(x, w["hidden_norm.weight" if "hidden_norm.weight" in w else "input_layernorm.weight"])
            if number == 0:
                residual = seen if self.config.get("norm_before_residual") else x
                seen = np.concatenate([_norm(self.embedding[tokens], w["input_layernorm.weight"]), seen], axis=-1)
            h = residual + _attention(w, seen, self.windows[number], self.rotary)
            inner = _norm(h, w["post_attention_layernorm.weight"])
            gate = inner @ w["mlp.gate_proj.weight"].T
            x = h + (self.activate(gate) * (inner @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        normed = _norm(x, self.w["norm.weight"])
        own = normed @ self.output.T
        logits = np.full((len(own), V), -np.inf, np.float32)
        logits[:, np.arange(own.shape[1]) + self.w.get("d2t", 0)] = own
        nested = self.config.get("eagle_config", {})
        return logits, normed if self.config.get("norm_output") or nested.get("return_hidden_post_norm") else x


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight


def _attention(w: dict[str, Array], x: Array, window: int, rotary: int) -> Array:
    def heads(key: str, count: int) -> Array:
        y = x @ w[f"self_attn.{key}_proj.weight"].T + w.get(f"self_attn.{key}_proj.bias", 0)
        y = y.reshape(len(x), count, DIM).swapaxes(0, 1)
        norm = w.get(f"self_attn.{key}_norm.weight")
        return y if norm is None else _norm(y, norm)

    queries, keys = _apply_rope(heads("q", HEADS), rotary), _apply_rope(heads("k", KV_HEADS), rotary)
    values = heads("v", KV_HEADS)
    keys, values = keys.repeat(HEADS // KV_HEADS, axis=0), values.repeat(HEADS // KV_HEADS, axis=0)
    scores = queries @ keys.swapaxes(1, 2) / DIM**0.5
    away = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = np.where((away >= 0) & (away < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    joint = found.swapaxes(0, 1).reshape(len(x), -1)
    return joint @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)


def _apply_rope(x: Array, rotary: int) -> Array:
    """Llama's rope: rotates the two halves of each head, or of its first `rotary` channels."""
    half, rest = rotary // 2, x[..., rotary:]
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:rotary]
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate([*turned, rest], axis=-1)
