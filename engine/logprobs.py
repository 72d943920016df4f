"""How likely the target finds the tokens of a forward's rows: log-softmax of what the sampler chooses from.

Before temperature and filters, in float32. Knows logits; nothing of which tokens will hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from outrider.protocol.logprobs import NEVER, Logprobs


class RowLogprobs:
    """Those of some rows, on the device: each row's whole distribution and its likeliest tokens. Lazy."""

    def __init__(self, logits: mx.array, count: int) -> None:
        """`logits` [R, V] after penalties, bias and grammar; `count` likeliest tokens are wanted."""
        logits = logits.astype(mx.float32)
        self._all = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        width = logits.shape[1]
        self._top = mx.argpartition(-self._all, kth=min(count, width - 1), axis=-1)[:, :count] if count else None

    @property
    def pending(self) -> list[mx.array]:
        """What to evaluate so that `of` need not wait."""
        return [self._all] if self._top is None else [self._all, self._top]

    def of(self, tokens: Sequence[int], rows: Sequence[int]) -> Logprobs:
        """These rows' tokens and what else was likely there. Waits."""
        every = np.array(self._all, copy=False)[rows]
        ids = np.asarray(tokens, np.int32)[:, None]
        if self._top is not None:
            top = np.array(self._top)[rows].astype(np.int32)
            order = np.argsort(-np.take_along_axis(every, top, 1), axis=1, kind="stable")
            ids = np.concatenate([ids, np.take_along_axis(top, order, 1)], axis=1)
        return Logprobs(ids, np.maximum(np.take_along_axis(every, ids, 1), np.float32(NEVER)))
