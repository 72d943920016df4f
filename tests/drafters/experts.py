"""Mixtures of experts and latent attention in numpy, by the papers' formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def silu(x: Array) -> Array:
    found: Array = x / (1 + np.exp(-x))
    return found


def sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def rms(x: Array, gain: Array, eps: float = 1e-5) -> Array:
    found: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain
    return found


def gated_mlp(w: Mapping[str, Array], at: str, x: Array) -> Array:
    found: Array = (silu(x @ w[f"{at}gate_proj"].T) * (x @ w[f"{at}up_proj"].T)) @ w[f"{at}down_proj"].T
    return found


def mix_experts(w: Mapping[str, Array], at: str, x: Array, chosen: Array, shares: Array) -> Array:
    """Sums, for each row, the outputs of its chosen experts [T, k], weighted by `shares`."""
    rows = [
        sum(share * gated_mlp(w, f"{at}experts.{number}.", row[None])[0] for number, share in zip(ns, ss, strict=True))
        for row, ns, ss in zip(x, chosen, shares, strict=True)
    ]
    return np.array(rows)


def softmax_moe(w: Mapping[str, Array], at: str, x: Array, count: int) -> Array:
    """Qwen's: the best experts by softmax, with their shares normalised, and a shared expert with a gate."""
    scores = x @ w[f"{at}gate"].T
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[:, :count]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    gate = sigmoid(x @ w[f"{at}shared_expert_gate"].T)
    return mix_experts(w, at, x, chosen, shares / shares.sum(axis=-1, keepdims=True)) + gate * gated_mlp(
        w, f"{at}shared_expert.", x
    )


def grouped_moe(w: Mapping[str, Array], at: str, x: Array, count: int, groups: int, kept: int, scale: float) -> Array:
    """DeepSeek's: sigmoid scores; a bias affects which groups and then experts are chosen, but not their shares."""
    scores = sigmoid(x @ w[f"{at}gate"].T)
    biased = scores + w[f"{at}gate.e_score_correction_bias"]
    of_group = np.sort(biased.reshape(len(x), groups, -1), axis=-1)[..., -2:].sum(axis=-1)
    open_groups = np.argsort(-of_group, axis=-1)[:, :kept]
    is_open = np.zeros((len(x), groups), bool)
    np.put_along_axis(is_open, open_groups, True, axis=-1)
    biased = np.where(np.repeat(is_open, biased.shape[1] // groups, axis=-1), biased, 0)
    chosen = np.argsort(-biased, axis=-1)[:, :count]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    shares = shares / shares.sum(axis=-1, keepdims=True) * scale
    return mix_experts(w, at, x, chosen, shares) + gated_mlp(w, f"{at}shared_experts.", x)


def latent_attention(
    w: Mapping[str, Array], x: Array, heads: int, nope: int, rope: int, theta: float, eps: float
) -> Array:
    """Attention with keys and values from one latent vector per token; a separate part of the key is rotated."""
    q = rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], eps) @ w["q_b_proj"].T
    q = q.reshape(len(x), heads, nope + rope).swapaxes(0, 1)
    rank = w["kv_a_layernorm"].shape[0]
    both = x @ w["kv_a_proj_with_mqa"].T
    kv = rms(both[:, :rank], w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    kv = kv.reshape(len(x), heads, -1).swapaxes(0, 1)
    keys, values = kv[..., :nope], kv[..., nope:]
    rotated = _apply_rope(q[..., nope:], theta) @ _apply_rope(both[None, :, rank:], theta).swapaxes(1, 2)
    scores = (q[..., :nope] @ keys.swapaxes(1, 2) + rotated) / (nope + rope) ** 0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = (shares / shares.sum(axis=-1, keepdims=True)) @ values
    joint: Array = found.swapaxes(0, 1).reshape(len(x), -1) @ w["o_proj"].T
    return joint


def _apply_rope(x: Array, theta: float) -> Array:
    """A rope that rotates pairs of neighbouring channels."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., ::2], x[..., 1::2]
    found = np.empty_like(x)
    found[..., ::2], found[..., 1::2] = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return found
