"""Logits only where somebody reads them: a prompt's tokens pass the model's last, widest layer by; and an output layer
that makes those of a draft's own vocabulary alone.

Wraps the output layer of a model (`lm_head`, or the embedding where both are one). It acts on the rows that were named
for the forward under way; with none named every row gets its logits, as in mlx-lm. Knows one layer, nothing of texts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Wanted:
    """The rows of the next forward that need logits, int [R]; None: all. `passed` tells whether a head has seen it."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.passed = False

    def of(self, hidden: mx.array) -> mx.array:
        """Hidden rows [1, T, D] without those that nobody reads."""
        if self.rows is None:
            return hidden
        self.passed = True
        return mx.take(hidden, self.rows, axis=1)


class ReducedHead(nn.Module):  # type: ignore[misc]
    """An output layer for some of the vocabulary's tokens, as FR-Spec's and EAGLE-3's: the others' logits are -inf.

    `rows` is the layer, [hidden] -> [tokens it can say]; `tokens` are their ids, ascending.
    """

    def __init__(self, hidden: int, count: int, vocab_size: int) -> None:
        super().__init__()
        self.rows = nn.Linear(hidden, count, bias=False)
        self.tokens = mx.arange(count, dtype=mx.int32)
        self.vocab_size = vocab_size
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return self.spread(self.rows(x))

    def spread(self, logits: mx.array) -> mx.array:
        """[..., V] of the rows' own [..., V_d]."""
        whole = mx.full((*logits.shape[:-1], self.vocab_size), -mx.inf, logits.dtype)
        whole[..., self.tokens] = logits
        return whole


class Head(nn.Module):  # type: ignore[misc]
    """An output layer that leaves out what is not wanted."""

    def __init__(self, inner: nn.Module, wanted: Wanted) -> None:
        super().__init__()
        self.inner = inner
        self._wanted = _Held(wanted)

    def __getattr__(self, name: str) -> Any:
        """Models may read their layer's own attributes, such as its weights."""
        inner = self.get("inner")
        if inner is None or name == "inner":
            return super().__getattr__(name)
        return getattr(inner, name)

    def __call__(self, x: mx.array) -> mx.array:
        is_output = isinstance(self.inner, nn.Linear | nn.QuantizedLinear | ReducedHead)
        found: mx.array = self.inner(self._wanted.of(x) if is_output else x)
        return found

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding's second use, as the output layer."""
        found: mx.array = self.inner.as_linear(self._wanted.of(x))
        return found


class _Held:
    """Keeps a plain object in a module without making it one of its parameters."""

    def __init__(self, wanted: Wanted) -> None:
        self.of = wanted.of


def unwrapped(layer: nn.Module) -> nn.Module:
    """The model's own layer, whether it was wrapped or not."""
    return layer.inner if isinstance(layer, Head) else layer


def install(model: nn.Module) -> Wanted:
    """Wraps the output layer of `model`, once; what it returns tells the layer which rows are wanted."""
    wanted = Wanted()
    for parent in model.modules():
        for name in ("lm_head", "embed_tokens", "wte", "tok_embeddings"):
            inner = parent.get(name) if isinstance(parent, dict) else None
            if isinstance(inner, Head):
                inner._wanted = _Held(wanted)
            elif isinstance(inner, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding | ReducedHead):
                parent[name] = Head(inner, wanted)
    return wanted
