"""What a head remembers of all its texts, and one forward over pairs of many of them.

Texts share forwards as the target's do, in rows of flat buffers. Knows pairs and hidden vectors; nothing of what is
chosen by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.head import MaskedHead, PairHead
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.engine.flat_rows import FlatRows, FlatText
from outrider.engine.numpy_flat import MOST_ROWS
from outrider.engine.piece import Piece
from outrider.engine.prompt_cache import Saved, Start

_LONG = 32  # so many pairs attend by themselves, as a prompt's do: they would pad all others


@dataclass(frozen=True, slots=True)
class PairFeed:
    """The next pairs of a text: tokens [N], maybe unread, each behind the token of its feature [N, W].

    `stays`: what is remembered of them is for good.
    """

    text: FlatText
    tokens: mx.array
    features: mx.array
    stays: bool = True

    @property
    def count(self) -> int:
        return int(self.features.shape[0])


class Reader(Protocol):
    """What a head remembers of its texts."""

    def open(self) -> FlatText: ...

    def close(self, text: FlatText) -> None: ...

    def read(self, feed: PairFeed) -> None:
        """Pairs that nothing is drafted behind. Lazy."""
        ...

    def save(self, text: FlatText, length: int) -> Saved:
        """A copy of the first `length` pairs of a text."""
        ...

    def adopt(self, text: FlatText, start: Start) -> None:
        """A text that is still empty begins with these."""
        ...

    def state(self) -> list[Any]:
        """What to evaluate."""
        ...


class Pairs(FlatRows):
    """The texts of one head. A text's `length` counts its pairs."""

    def __init__(self, head: PairHead, numpy: NumpyHead | None = None) -> None:
        """`numpy` makes the forwards of few pairs."""
        super().__init__(head)
        self._head, self._numpy = head, numpy

    def read(self, feed: PairFeed) -> None:
        self.hidden([feed])

    def forward(self, feeds: Sequence[PairFeed]) -> mx.array:
        """Feeds them all, which stand in the order of their rows; the hidden vector of each one's last pair [R, H]."""
        order = sorted(feeds, key=lambda feed: feed.count > _LONG)
        hidden = self.hidden(order)
        ends = np.cumsum([feed.count for feed in order]) - 1
        last = dict(zip((feed.text.row for feed in order), ends.tolist(), strict=True))
        return mx.take(hidden, mx.array([last[feed.text.row] for feed in feeds], mx.int32), axis=0)

    def hidden(self, feeds: Sequence[PairFeed]) -> mx.array:
        """The hidden vectors of all their pairs [T, H], one feed's after the other's, long ones behind short ones."""
        if not self._head.together and len(feeds) > 1:
            return mx.concatenate([self.hidden([feed]) for feed in feeds])
        pieces = [Piece(f.text.row, f.text.length, f.count, f.count > _LONG) for f in feeds]
        tokens = mx.concatenate([feed.tokens for feed in feeds])
        features = mx.concatenate([feed.features for feed in feeds])
        if self._numpy is not None and len(tokens) <= MOST_ROWS:
            hidden = self._numpy.hidden(tokens, features, pieces, self._caches)
        else:
            self._frame.begin(pieces)
            hidden = self._head(tokens[None], features[None], self._caches)[0]
        for feed in feeds:
            feed.text.length += feed.count
        return hidden


class MaskedPairs(Pairs):
    """Those of a head that is fed pairs of a mask, too."""

    def __init__(self, head: MaskedHead, numpy: NumpyHead | None = None) -> None:
        super().__init__(head, numpy)
        self._masked = head

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Feeds them all, in the order of their rows; the hidden vectors of so many tokens behind each [sum, H]."""
        longer = [self._with_masks(feed, depth - 1) for feed, depth in zip(feeds, depths, strict=True)]
        order = sorted(range(len(feeds)), key=lambda n: longer[n].count > _LONG)
        hidden = self.hidden([longer[n] for n in order])
        ends = dict(zip(order, np.cumsum([longer[n].count for n in order]).tolist(), strict=True))
        places = np.concatenate([np.arange(ends[n] - depth, ends[n]) for n, depth in enumerate(depths)])
        return mx.take(hidden, mx.array(places.astype(np.int32)), axis=0)

    def _with_masks(self, feed: PairFeed, count: int) -> PairFeed:
        tokens = mx.full((count,), self._masked.mask_token, mx.int32)
        features = mx.repeat(self._masked.mask_feature, count, axis=0)
        return PairFeed(feed.text, mx.concatenate([feed.tokens, tokens]), mx.concatenate([feed.features, features]))
