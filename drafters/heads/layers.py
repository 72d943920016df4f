"""The parts of heads: layers with Llama's and Qwen3's names, a draft vocabulary, links between a block's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, qwen3
from mlx_lm.models.rope_utils import initialize_rope

from outrider.engine.flat import FlatCache, attention
from outrider.engine.hidden_states import scatter_logits

LINK_CANDIDATES = 16
MLPS = {"silu": qwen3.MLP, "gelu_pytorch_tanh": gemma3_text.MLP}
"""By `hidden_act`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes and switches of a head's transformer layers, by the names of Llama's and Qwen3's configs.

    `partial_rotary_factor`: the part of the channels that the rope rotates; `is_neox_style`: by halves, not neighbours.
    `biases`: of "qkvo".
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    partial_rotary_factor: float = 1.0
    is_neox_style: bool = True
    context_length: int
    hidden_act: str = "silu"
    qk_norm: bool = False
    biases: str = ""


class Attention(nn.Module):  # type: ignore[misc]
    """Attention over vectors of `width`, which may be wider than its output."""

    def __init__(self, sizes: LayerSizes, width: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self._dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.scale = self._dim**-0.5
        self.q_proj = nn.Linear(width, self.n_heads * self._dim, bias="q" in sizes.biases)
        self.k_proj = nn.Linear(width, self.n_kv_heads * self._dim, bias="k" in sizes.biases)
        self.v_proj = nn.Linear(width, self.n_kv_heads * self._dim, bias="v" in sizes.biases)
        self.o_proj = nn.Linear(self.n_heads * self._dim, sizes.hidden_size, bias="o" in sizes.biases)
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self._dim, eps=sizes.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self._dim, eps=sizes.rms_norm_eps)
        rotated, interleaved = int(self._dim * sizes.partial_rotary_factor), not sizes.is_neox_style
        self.rope = initialize_rope(rotated, sizes.rope_theta, interleaved, sizes.rope_scaling, sizes.context_length)

    def __call__(self, x: mx.array, mask: Any, cache: FlatCache) -> mx.array:
        queries = self.rope(self._by_head(self.q_proj(x), self.n_heads, "q_norm"), offset=cache.offset)
        keys, values = self.read(x, cache)
        attended = attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        out: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(1, x.shape[1], -1))
        return out

    def read(self, x: mx.array, cache: FlatCache) -> tuple[mx.array, mx.array]:
        """Adds the keys and values of x [1, T, width] to the cache; returns all of them."""
        keys = self._by_head(self.k_proj(x), self.n_kv_heads, "k_norm")
        values = self._by_head(self.v_proj(x), self.n_kv_heads)
        return cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)

    def _by_head(self, x: mx.array, heads: int, norm: str = "") -> mx.array:
        split = x.reshape(1, x.shape[1], heads, self._dim)
        return (self[norm](split) if norm in self else split).swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The head's tokens: `ids` [V_d] are the target's ids of them; None: they are the target's `size` tokens."""

    size: int
    ids: mx.array | None = None

    @property
    def draft_size(self) -> int:
        """The number of tokens that the head has."""
        return self.size if self.ids is None else int(self.ids.shape[0])

    def spread(self, own: mx.array) -> mx.array:
        """Returns the logits [R, V] from the head's own [R, V_d]; -inf for tokens that it does not know."""
        return own if self.ids is None else scatter_logits(own, self.ids, self.size)


class Markov(nn.Module):  # type: ignore[misc]
    """DSpark's Markov head (arXiv 2607.05147), vanilla or `gated` by the slot's vector: a low-rank product of the token
    before and the candidate."""

    def __init__(self, gated: bool, rank: int, size: int, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self._draft_ids, ids = mx.zeros((vocabulary.size,), mx.int32), vocabulary.ids  # 0: it does not know the token
        self._draft_ids[mx.arange(vocabulary.size) if ids is None else ids] = mx.arange(vocabulary.draft_size)
        self.markov_w1 = nn.Embedding(vocabulary.size, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary.draft_size, bias=False)
        if gated:
            self.gate_proj = nn.Linear(size + rank, rank)

    def __call__(self, before: mx.array, hidden: mx.array, candidates: mx.array) -> mx.array:
        code = self.markov_w1(before)
        if "gate_proj" in self:
            code = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, code], axis=-1))) * code
        return _multiply_codes(self.markov_w2.weight[self._draft_ids[candidates]], code)


class Selector(nn.Module):  # type: ignore[misc]
    """DFlash2's selector: the product of the codes of two tokens, weighted by the slot's vector."""

    def __init__(self, rank: int, size: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = mx.zeros((vocab_size, rank))
        self.successor_codebook = mx.zeros((vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def __call__(self, before: mx.array, hidden: mx.array, candidates: mx.array) -> mx.array:
        weights = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return _multiply_codes(self.successor_codebook[candidates], weights)


def _multiply_codes(codes: mx.array, weights: mx.array) -> mx.array:
    """Returns the products [R, C] of codes [R, C, rank] and weights [R, rank]."""
    return (codes @ weights[..., None])[..., 0].astype(mx.float32)


BlockLink = Markov | Selector
"""Scores each slot's candidates again when the token before is known, since a block's slots are drafted at once.

A call returns the gains in logits [R, C] of candidates [R, C] after the tokens `before` [R], in slots with these
vectors [R, H]. Only the `LINK_CANDIDATES` best candidates are scored, with the sampler's noise included, because noise
promotes tokens that are unlikely by themselves."""
