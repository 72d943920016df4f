"""What layers of heads are made of, by Llama's and Qwen3's names."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from outrider.engine.flat import FlatCache, attention


class Sizes(Protocol):
    """What of a head's settings attention depends on."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> dict[str, Any] | None: ...

    @property
    def context_length(self) -> int: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def attention_bias(self) -> bool: ...


class Attention(nn.Module):  # type: ignore[misc]
    """Over vectors of `width`, which may be wider than what it gives."""

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self._dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.scale = self._dim**-0.5
        self.q_proj = nn.Linear(width, self.n_heads * self._dim, bias=sizes.attention_bias)
        self.k_proj = nn.Linear(width, self.n_kv_heads * self._dim, bias=sizes.attention_bias)
        self.v_proj = nn.Linear(width, self.n_kv_heads * self._dim, bias=sizes.attention_bias)
        self.o_proj = nn.Linear(self.n_heads * self._dim, sizes.hidden_size, bias=sizes.attention_bias)
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self._dim, eps=sizes.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self._dim, eps=sizes.rms_norm_eps)
        self.rope = initialize_rope(self._dim, sizes.rope_theta, False, sizes.rope_scaling, sizes.context_length)

    def __call__(self, x: mx.array, mask: Any, cache: FlatCache) -> mx.array:
        queries = self.rope(self._by_head(self.q_proj(x), self.n_heads, "q_norm"), offset=cache.offset)
        keys, values = self.read(x, cache)
        found = attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        out: mx.array = self.o_proj(found.swapaxes(1, 2).reshape(1, x.shape[1], -1))
        return out

    def read(self, x: mx.array, cache: FlatCache) -> tuple[mx.array, mx.array]:
        """Remembers what x [1, T, width] makes; all keys and values then."""
        keys = self._by_head(self.k_proj(x), self.n_kv_heads, "k_norm")
        values = self._by_head(self.v_proj(x), self.n_kv_heads)
        return cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)

    def _by_head(self, x: mx.array, heads: int, norm: str = "") -> mx.array:
        parted = x.reshape(1, x.shape[1], heads, self._dim)
        return (self[norm](parted) if norm in self else parted).swapaxes(1, 2)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
