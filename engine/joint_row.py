"""Several trees of an MLX model in one forward: one flat row of all their tokens, attention tree by tree.

As `engine.flat` for the target's texts: dense layers read the weights once, mlx-lm's common attention function asks the
cache objects. Each tree keeps columns of its own, so that it may fork, gather and end whatever the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.engine.cache import stand_in
from outrider.engine.columns import ColumnCache, NewColumns, OneRow
from outrider.engine.flat import Mask, install
from outrider.engine.loading import LoadedModel


class JointRow(OneRow):
    """`Columns` of a model whose attention is mlx-lm's common one (`engine.selfcheck.agrees_in_company` tells)."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model)
        install(model.model)

    @staticmethod
    def forward(texts: Sequence[OneRow], new: Sequence[NewColumns]) -> mx.array:
        if len(texts) == 1:
            return OneRow.forward(texts, new)
        ends = np.cumsum([len(one.parents) for one in new]).tolist()
        spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        places = mx.array(np.concatenate([one.positions[one.start :] for one in new]))
        for text, one in zip(texts, new, strict=True):
            text.frame.tree(one.start, one.positions, one.seen)
        numbers = count()

        def joint(_: Any) -> JointCache:
            number = next(numbers)
            return JointCache([text.leaves[number] for text in texts], spans, places)

        caches = [stand_in(cache, joint) for cache in texts[0].caches]
        tokens = mx.concatenate([one.lazy_tokens() for one in new])
        logits: mx.array = texts[0].model(tokens[None], cache=caches)
        return logits[0]


class JointCache:
    """One attention layer's columns of several trees, for one forward; `spans`: where each one's tokens are in it."""

    def __init__(self, caches: Sequence[ColumnCache], spans: Sequence[slice], places: mx.array) -> None:
        self._caches, self._spans = caches, spans
        self.offset = places

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return Mask(window_size or self._caches[0].window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Remembers keys and values [1, H, T, D], each tree its own; what is returned nobody reads."""
        for cache, span in zip(self._caches, self._spans, strict=True):
            cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        return keys, values

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: Any) -> mx.array:
        """The attention of flat queries [1, H, T, D], each over its own tree."""
        found = []
        for cache, span in zip(self._caches, self._spans, strict=True):
            keys, values = cache.keys_and_values()
            mask = cache.frame.mask(span.stop - span.start, False, window)
            own = queries[:, :, span]
            found.append(mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=mask, sinks=sinks))
        return mx.concatenate(found, axis=2)
