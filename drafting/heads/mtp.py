"""Heads for multi-token prediction that come with a target: one of its own layers over a row and the token behind it.

Embedding and output layer are the target's, mostly. What families do differently is in a `MtpForm`: which row, in which
order. Knows no files.
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
    """`after_norm`: it reads rows behind the final norm, the target's and then its own. `embedding_first`: so they are
    fused with the token. `together`: its attention takes several texts at once.
    """

    after_norm: bool
    embedding_first: bool
    together: bool = True


class Mtp(nn.Module):  # type: ignore[misc]
    """A `StepHead`. `block`: a layer of the target's kind; `embed`, `output`: the target's own."""

    def __init__(
        self,
        form: MtpForm,
        size: int,
        eps: float,
        block: nn.Module,
        embed: Layer,
        output: Layer,
        context_length: int,
        own_embedding: int = 0,
        own_output: int = 0,
    ) -> None:
        """`own_embedding`, `own_output`: of so many tokens in place of the target's, if any."""
        super().__init__()
        self.form, self._embed, self._output, self._context_length = form, embed, output, context_length
        self.norm_embedding = nn.RMSNorm(size, eps=eps)
        self.norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [block]
        self.norm = nn.RMSNorm(size, eps=eps)
        if own_embedding:
            self.embed_tokens = nn.Embedding(own_embedding, size)
        if own_output:
            self.lm_head = nn.Linear(size, own_output, bias=False)

    @property
    def together(self) -> bool:
        return self.form.together

    @property
    def points(self) -> TapPoints:
        return TapPoints(before_norm=not self.form.after_norm, after_norm=self.form.after_norm)

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
        kept = [attention[name].weight for name in ("k_proj", "v_proj", "kv_a_proj_with_mqa") if name in attention]
        return sum(int(weight.shape[0]) * int(weight.dtype.size) for weight in kept)

    def fuse(self, rows: mx.array) -> mx.array:
        return rows.astype(self.fc.weight.dtype)

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        embed = self.embed_tokens if "embed_tokens" in self else self._embed
        embedded = self.norm_embedding(embed(tokens).astype(features.dtype))
        seen = self.norm_hidden(features)
        both = [embedded, seen] if self.form.embedding_first else [seen, embedded]
        x = self.fc(mx.concatenate(both, axis=-1))
        mask = caches[0].make_mask(tokens.shape[1], return_array=not self.form.together)
        out: mx.array = self.layers[0](x, mask, caches[0])
        return out

    def logits(self, hidden: mx.array) -> mx.array:
        normed = self.norm(hidden)
        own = self.lm_head(normed) if "lm_head" in self else self._output(normed)
        return own.astype(mx.float32)

    def onward(self, hidden: mx.array) -> mx.array:
        normed: mx.array = self.norm(hidden)
        return normed if self.form.after_norm else hidden
