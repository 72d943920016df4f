"""Layers of experts and their attention in numpy, by the papers' formulas."""

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


def mixed(w: Mapping[str, Array], at: str, x: Array, chosen: Array, shares: Array) -> Array:
    """Each row by its chosen experts [T, k], so much of each."""
    rows = [
        sum(share * gated_mlp(w, f"{at}experts.{number}.", row[None])[0] for number, share in zip(ns, ss, strict=True))
        for row, ns, ss in zip(x, chosen, shares, strict=True)
    ]
    return np.array(rows)


def by_softmax(w: Mapping[str, Array], at: str, x: Array, count: int) -> Array:
    """Qwen's: softmax over all, the best of them normed; a shared one behind a gate of its own."""
    scores = x @ w[f"{at}gate"].T
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[:, :count]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    gate = sigmoid(x @ w[f"{at}shared_expert_gate"].T)
    return mixed(w, at, x, chosen, shares / shares.sum(axis=-1, keepdims=True)) + gate * gated_mlp(
        w, f"{at}shared_expert.", x
    )


def by_groups(w: Mapping[str, Array], at: str, x: Array, count: int, groups: int, kept: int, scale: float) -> Array:
    """DeepSeek's: sigmoids; a bias decides who is chosen, first which groups, and has no part in the shares."""
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
    return mixed(w, at, x, chosen, shares) + gated_mlp(w, f"{at}shared_experts.", x)


def latent_attention(
    w: Mapping[str, Array], x: Array, heads: int, nope: int, rope: int, theta: float, eps: float
) -> Array:
    """Of keys and values that are made of one latent vector a token, beside which a part of the key turns."""
    q = rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], eps) @ w["q_b_proj"].T
    q = q.reshape(len(x), heads, nope + rope).swapaxes(0, 1)
    rank = w["kv_a_layernorm"].shape[0]
    both = x @ w["kv_a_proj_with_mqa"].T
    kv = rms(both[:, :rank], w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    kv = kv.reshape(len(x), heads, -1).swapaxes(0, 1)
    keys, values = kv[..., :nope], kv[..., nope:]
    turned = _turned(q[..., nope:], theta) @ _turned(both[None, :, rank:], theta).swapaxes(1, 2)
    scores = (q[..., :nope] @ keys.swapaxes(1, 2) + turned) / (nope + rope) ** 0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = (shares / shares.sum(axis=-1, keepdims=True)) @ values
    joint: Array = found.swapaxes(0, 1).reshape(len(x), -1) @ w["o_proj"].T
    return joint


def _turned(x: Array, theta: float) -> Array:
    """Neighbours turn together."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., ::2], x[..., 1::2]
    found = np.empty_like(x)
    found[..., ::2], found[..., 1::2] = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return found
