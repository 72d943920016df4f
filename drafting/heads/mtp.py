"""Heads for multi-token prediction that come with a target: one of its own layers over a row and the token behind it.

Embedding and output layer are the target's. What families do differently is in a `MtpForm`: which row, in which order.
Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.engine.flat import FlatCache
from outrider.engine.taps import TapPoints

Layer = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class MtpForm:
    """`after_norm`: it reads the target's rows behind the final norm. `embedding_first`: so they are fused."""

    after_norm: bool
    embedding_first: bool


class Mtp(nn.Module):  # type: ignore[misc]
    """A `Head`. `block`: a layer of the target's kind; `embed`, `output`: the target's own."""

    def __init__(
        self, form: MtpForm, size: int, eps: float, block: nn.Module, embed: Layer, output: Layer, context_length: int
    ) -> None:
        super().__init__()
        self._form, self._embed, self._output, self._context_length = form, embed, output, context_length
        self.norm_embedding = nn.RMSNorm(size, eps=eps)
        self.norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [block]
        self.norm = nn.RMSNorm(size, eps=eps)

    @property
    def points(self) -> TapPoints:
        return TapPoints(before_norm=not self._form.after_norm, after_norm=self._form.after_norm)

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def reach(self) -> None:
        return None

    @property
    def weight_bytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.parameters()))

    @property
    def bytes_per_pair(self) -> int:
        attention = self.layers[0].self_attn
        return sum(int(p.weight.shape[0]) * int(p.weight.dtype.size) for p in (attention.k_proj, attention.v_proj))

    def fuse(self, rows: mx.array) -> mx.array:
        return rows.astype(self.fc.weight.dtype)

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        embedded = self.norm_embedding(self._embed(tokens).astype(features.dtype))
        seen = self.norm_hidden(features)
        both = [embedded, seen] if self._form.embedding_first else [seen, embedded]
        x = self.fc(mx.concatenate(both, axis=-1))
        out: mx.array = self.norm(self.layers[0](x, caches[0].make_mask(tokens.shape[1]), caches[0]))
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        return self._output(hidden).astype(mx.float32)

    def onward(self, hidden: mx.array) -> mx.array:
        return hidden
