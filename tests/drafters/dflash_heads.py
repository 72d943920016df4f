"""Random block heads in each published layout, with an independent forward in numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.drafters.dflash_layouts import (
    DIM,
    EPS,
    GROUP,
    HEADS,
    INNER,
    KV_HEADS,
    LAYOUTS,
    MASK,
    RANK,
    SOFTCAP,
    TAPS,
    THETA,
    V_D,
    H,
    Layout,
    V,
)

Array = np.ndarray[Any, np.dtype[Any]]


def weights_of(layout: Layout, seed: int = 0) -> dict[str, Array]:
    """Random weights, as a checkpoint of this layout has them."""
    draws = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return (draws.standard_normal(shape) * 1.3 / shape[-1] ** 0.5).astype(np.float32)

    def gains(count: int) -> Array:
        return (1 + 0.3 * draws.standard_normal(count)).astype(np.float32)

    found = {"fc.weight": matrix(H, len(TAPS) * H), "hidden_norm.weight": gains(H), "norm.weight": gains(H)}
    for number in range(2):
        at = f"layers.{number}."
        found |= {f"{at}{norm}.weight": gains(H) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}self_attn.{key}_norm.weight": gains(DIM) for key in "qk"}
        shapes = {"q": (HEADS * DIM, H), "k": (KV_HEADS * DIM, H), "v": (KV_HEADS * DIM, H), "o": (H, HEADS * DIM)}
        found |= {f"{at}self_attn.{key}_proj.weight": matrix(*shape) for key, shape in shapes.items()}
        shapes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
        found |= {f"{at}mlp.{key}_proj.weight": matrix(*shape) for key, shape in shapes.items()}
        if layout.convolves:
            for part in ("attention_conv", "mlp_conv"):
                base = np.stack([np.ones((2, H)), np.zeros((2, H))], axis=1)
                found[f"{at}{part}.base_kernel"] = (base + 0.2 * draws.standard_normal((2, 2, H))).astype(np.float32)
                found[f"{at}{part}.kernel_projection.weight"] = 0.3 * matrix(4 * H // GROUP, H)
    known = V_D if layout.maps else V
    if layout.convolves:
        found["candidate_selector.predecessor_codebook"] = 2 * matrix(V, RANK)
        found["candidate_selector.successor_codebook"] = 2 * matrix(V, RANK)
        found["candidate_selector.hidden_projection.weight"] = matrix(RANK, H)
    if layout.markov:
        found["markov_head.markov_w1.weight"], found["markov_head.markov_w2.weight"] = (
            matrix(V, RANK),
            matrix(known, RANK),
        )
        found |= {"confidence_head.proj.weight": matrix(1, H + RANK), "confidence_head.proj.bias": gains(1)}
    if layout.markov == "gated":
        found |= {"markov_head.gate_proj.weight": matrix(RANK, H + RANK), "markov_head.gate_proj.bias": gains(RANK)}
    if layout.maps:
        ids = np.sort(draws.permutation(V)[:V_D])
        found |= {"lm_head.weight": matrix(V_D, H), "d2t": (ids - np.arange(V_D)).astype(np.int64)}
        found["t2d"] = np.isin(np.arange(V), ids)
    if layout.copies:
        found |= {"embed_tokens.weight": matrix(V, H), "lm_head.weight": matrix(V, H)}
    return {layout.renamed(key): value for key, value in found.items()}


def write(folder: Path, name: str, seed: int = 0, config: dict[str, Any] | None = None, **other: Any) -> Path:
    """Writes a checkpoint of this layout. `other` weights replace its own; those that are None are left out."""
    layout = LAYOUTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**layout.config, **(config or {})}))
    weights = {**weights_of(layout, seed), **other}
    arrays = {key: mx.array(value) for key, value in weights.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


@dataclass
class NumpyHead:
    """The forward by the papers' formulas: the whole context and one block at once, without a cache."""

    layout: Layout
    embedding: Array
    output: Array
    seed: int = 0

    def __post_init__(self) -> None:
        self.w = {self.layout.plain(key): value for key, value in weights_of(self.layout, self.seed).items()}

    def fuse(self, rows: Array) -> Array:
        return _norm(rows @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])

    def hidden(
        self, features: Array, anchor: int | list[int], depth: int, places: Array | None = None, begin: int = -1
    ) -> Array:
        """Hidden vectors of the `depth` tokens after the anchor, or after several known tokens: [depth, H].

        `places`: the positions of the features if some are missing; `begin`: that of the block.
        """
        known = anchor if isinstance(anchor, list) else [anchor]
        count = len(known) - 1 + (depth if self.layout.from_anchor else depth + 1)
        x = self.embedding[known + [MASK] * (count - len(known))]
        self.places = np.arange(len(features)) if places is None else places
        self.begin = len(features) if begin < 0 else begin
        for number in range(2):
            w = {k.removeprefix(f"layers.{number}."): v for k, v in self.w.items() if k.startswith(f"layers.{number}.")}
            seen, after = self._convolutions(w, "attention_conv", _norm(x, w["input_layernorm.weight"]))
            x = x + after(self._attention(w, features, seen, number))
            seen, after = self._convolutions(w, "mlp_conv", _norm(x, w["post_attention_layernorm.weight"]))
            gate = seen @ w["mlp.gate_proj.weight"].T
            x = x + after((gate * _sigmoid(gate) * (seen @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T)
        return _norm(x, self.w["norm.weight"])[count - depth :]

    def logits(self, hidden: Array) -> Array:
        if self.layout.convolves:
            return np.tanh((hidden * 0.5) @ self.output.T / SOFTCAP) * SOFTCAP
        if not self.layout.maps:
            return hidden @ self.output.T
        found = np.full((len(hidden), V), -np.inf, np.float32)
        found[:, self.ids] = hidden @ self.w["lm_head.weight"].T
        return found

    @property
    def ids(self) -> Array:
        return np.arange(V_D) + self.w["d2t"] if self.layout.maps else np.arange(V)

    def chain(
        self, features: Array, anchor: int, depth: int, noise: Array | None = None, temp: float = 1.0
    ) -> list[int]:
        """Chooses slot by slot, from the 16 best tokens by logits and noise, the best one given the token before."""
        hidden = self.hidden(features, anchor, depth)
        scores = self.logits(hidden) / temp + (0 if noise is None else noise)
        found, before = list[int](), anchor
        for slot in range(depth):
            few = np.argsort(-scores[slot])[:16]
            gains = self._gains(before, hidden[slot])
            before = int(few[np.argmax(scores[slot][few] + gains[few] / temp)])
            found.append(before)
        return found

    def scores_after(self, before: int, hidden: Array, noise: Array | float = 0.0, temp: float = 1.0) -> Array:
        """Scores [V] of a slot with this hidden vector [H] after token `before`; Markov heads score the 16 best."""
        scores = self.logits(hidden[None])[0] / temp + noise
        found = scores + self._gains(before, hidden) / temp
        if self.layout.convolves or self.layout.markov:
            found[np.argsort(-scores)[16:]] = -np.inf
        return found

    def _gains(self, before: int, hidden: Array) -> Array:
        if self.layout.convolves:
            wanted = self.w["candidate_selector.hidden_projection.weight"] @ hidden
            wanted = self.w["candidate_selector.predecessor_codebook"][before] * wanted
            return self.w["candidate_selector.successor_codebook"] @ wanted
        gains = np.zeros(V)
        if not self.layout.markov:
            return gains
        known = self.w["markov_head.markov_w1.weight"][before]
        latent = known
        if self.layout.markov == "gated":
            both = np.concatenate([hidden, known])
            latent = _sigmoid(self._linear("markov_head.gate_proj", both)) * known
        gains[self.ids] = self.w["markov_head.markov_w2.weight"] @ latent
        return gains

    def _linear(self, name: str, x: Array) -> Array:
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def _convolutions(self, w: dict[str, Array], name: str, x: Array) -> tuple[Array, Any]:
        """A sublayer's input for rows x, and the function that is applied to its output."""
        if not self.layout.convolves:
            return x, lambda y: y
        kernels = (x @ w[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, 2, H // GROUP)
        base = w[f"{name}.base_kernel"]

        def convolved(rows: Array, which: int) -> Array:
            found = np.zeros_like(rows)
            for row in range(len(rows)):
                for tap in range(2):
                    if row >= tap:
                        kernel = base[which, tap] + kernels[row, which, tap].repeat(GROUP)
                        found[row] += kernel * rows[row - tap]
            return found

        return convolved(x, 0), lambda y: convolved(y, 1)

    def _apply_rope(self, y: Array, places: Array) -> Array:
        half = DIM // 2
        angles = places[:, None] * THETA ** (-np.arange(half) / half)
        a, b = (y[..., ::2], y[..., 1::2]) if self.layout.interleaved else (y[..., :half], y[..., half:])
        a, b = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
        return np.stack([a, b], axis=-1).reshape(y.shape) if self.layout.interleaved else np.concatenate([a, b], -1)

    def _attention(self, w: dict[str, Array], features: Array, x: Array, number: int) -> Array:
        own = self.begin + np.arange(len(x))
        queries = self._apply_rope(_heads(x, w, "q", HEADS), own)
        keys = [(features, self.places), (x, own)]
        keys = np.concatenate([self._apply_rope(_heads(y, w, "k", KV_HEADS), at) for y, at in keys], axis=1)
        values = np.concatenate([_heads(features, w, "v", KV_HEADS), _heads(x, w, "v", KV_HEADS)], axis=1)
        keys, values = keys.repeat(HEADS // KV_HEADS, axis=0), values.repeat(HEADS // KV_HEADS, axis=0)
        scores = queries @ keys.swapaxes(1, 2) / DIM**0.5
        away, window = own[:, None] - np.concatenate([self.places, own]), self.layout.windows[number]
        if window:
            scores = np.where(away < window, scores, -np.inf)
        if self.layout.causal[number]:
            scores = np.where(away >= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        return found.swapaxes(0, 1).reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


def _heads(x: Array, w: dict[str, Array], key: str, count: int) -> Array:
    y = (x @ w[f"self_attn.{key}_proj.weight"].T).reshape(len(x), count, DIM).swapaxes(0, 1)
    return y if key == "v" else _norm(y, w[f"self_attn.{key}_norm.weight"])


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
