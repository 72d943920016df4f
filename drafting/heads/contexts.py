"""What a block head remembers of all its texts: their features; and one forward over blocks behind many of them.

A block's own keys and values are written behind the features and left there for what comes next to overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.head import BlockHead
from outrider.drafting.heads.pairs import PairFeed
from outrider.engine.flat_rows import FlatRows
from outrider.engine.piece import Piece


class Contexts(FlatRows):
    """The texts of one head. A text's `length` counts its features."""

    def __init__(self, head: BlockHead, from_anchor: bool | None = None) -> None:
        """`from_anchor`: in place of what the head says of itself."""
        super().__init__(head)
        self._head = head
        self._masks_more = 0 if (head.from_anchor if from_anchor is None else from_anchor) else 1

    def read(self, feed: PairFeed) -> None:
        self._read([feed])

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads them all, in the order of their rows; the hidden vectors of so many tokens behind each [sum, H]."""
        self._read(feeds)
        counts = [depth + self._masks_more for depth in depths]
        texts = [feed.text for feed in feeds]
        self._frame.begin([Piece(t.row, t.length, n, whole=True) for t, n in zip(texts, counts, strict=True)])
        blocks = [self._block(feed, count) for feed, count in zip(feeds, counts, strict=True)]
        places = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        hidden = self._head.block(mx.concatenate(blocks)[None], mx.array(places), self._caches)[0]
        if not self._masks_more:
            return hidden
        return mx.take(hidden, mx.array(np.flatnonzero(places).astype(np.int32)), axis=0)

    def _read(self, feeds: Sequence[PairFeed]) -> None:
        self._frame.begin([Piece(feed.text.row, feed.text.length, feed.count) for feed in feeds])
        self._head.read(mx.concatenate([feed.features for feed in feeds])[None], self._caches)
        for feed in feeds:
            feed.text.length += feed.count

    def _block(self, feed: PairFeed, count: int) -> mx.array:
        masks = mx.full((count - 1,), self._head.mask_token, mx.int32)
        return mx.concatenate([feed.tokens[-1:], masks])
