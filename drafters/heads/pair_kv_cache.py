"""A head's keys and values of all its texts, and forwards over pairs of several texts, by MLX or by numpy.

Texts share forwards as the target's do, in rows of flat buffers. Knows pairs and hidden vectors; nothing of sampling.

`NumpyHead` computes forwards of few pairs by numpy, for MTP and EAGLE-3 heads (P-EAGLE's too) with Llama's or Qwen3's
layers: in the target's process over the buffers of `engine.flat`, in the draft worker over those of `HostKVRows`. It is
not lazy. `load` checks at load that it agrees with MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import MaskedHead, PairHead
from outrider.engine.flat import FlatCache, FlatRows, FlatSequence, Floats, Ints, Segment
from outrider.engine.numpy_net import MOST_ROWS, NumpyLayer, NumpySegment, spans
from outrider.engine.positions import RopeTable

Begin = Callable[[Ints, Floats], tuple[Floats, Floats]]
Rows = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class NumpyHead:
    """A head's forwards on the host, from its weights (`Mtp.on_host`, `Eagle3.on_host`).

    `begin` computes from tokens [T] and features [T, W] the input of the first layer [T, H] and that of its attention.
    `scores` and `stands_in` correspond to a head's `logits` and `onward`.
    """

    layers: Sequence[NumpyLayer]
    rope: RopeTable
    begin: Begin
    scores: Rows
    stands_in: Rows

    def rows(self, tokens: Ints, features: Floats, positions: Ints, spans: Iterable[Sequence[NumpySegment]]) -> Floats:
        """Returns the hidden vectors [T, H] of pairs at these positions; `spans`: each layer's, text by text."""
        angles = self.rope.on_host(positions)
        first, *others = zip(self.layers, spans, strict=True)
        with np.errstate(all="ignore"):  # closed gates underflow; the caller checks that vectors are finite
            x, attended = self.begin(tokens, features)
            x = first[0].behind(x, attended, angles, first[1])
            for layer, own in others:
                x = layer(x, angles, own)
        return x

    def hidden(
        self, tokens: mx.array, features: mx.array, segments: Sequence[Segment], caches: Sequence[FlatCache]
    ) -> mx.array:
        """Returns the hidden vectors [T, H] of pairs, segment by segment."""
        positions = np.concatenate([segment.positions for segment in segments])
        own = spans(self.layers, segments, caches)
        return mx.array(self.rows(np.array(tokens), np.array(features, copy=False), positions, own))

    def logits(self, hidden: mx.array) -> mx.array:
        return mx.array(self.scores(np.array(hidden, copy=False)))

    def onward(self, hidden: mx.array) -> mx.array:
        return mx.array(self.stands_in(np.array(hidden, copy=False)))


_LONG = 32  # a feed with more pairs attends separately, as a prompt does: the others would be padded to its length


@dataclass(frozen=True, slots=True)
class PairFeed:
    """The next pairs of a text: tokens [N], maybe lazy, each after the token of its feature [N, W].

    `stays`: their keys and values are final.
    """

    text: FlatSequence
    tokens: mx.array
    features: mx.array
    stays: bool = True

    @property
    def count(self) -> int:
        return int(self.features.shape[0])


class HeadKVCache(FlatRows):
    """The texts of one head. A text's `length` is the number of pairs or features read."""

    def read(self, feed: PairFeed) -> None:
        """Reads pairs without drafting after them. Lazy."""
        raise NotImplementedError


class PairKVCache(HeadKVCache):
    """The texts of a head that is fed pairs."""

    def __init__(self, head: PairHead, numpy: NumpyHead | None = None) -> None:
        """`numpy` makes forwards of few pairs."""
        super().__init__(head)
        self._head, self.numpy = head, numpy

    def read(self, feed: PairFeed) -> None:
        self.hidden([feed])

    def forward(self, feeds: Sequence[PairFeed]) -> mx.array:
        """Reads all feeds, in the order of their rows; returns the hidden vector of each one's last pair [R, H]."""
        order = sorted(feeds, key=lambda feed: feed.count > _LONG)
        hidden = self.hidden(order)
        ends = np.cumsum([feed.count for feed in order]) - 1
        last = dict(zip((feed.text.row for feed in order), ends.tolist(), strict=True))
        return mx.take(hidden, mx.array([last[feed.text.row] for feed in feeds], mx.int32), axis=0)

    def hidden(self, feeds: Sequence[PairFeed]) -> mx.array:
        """Reads all feeds; returns the hidden vectors of their pairs [T, H], feed by feed, long feeds last."""
        if not self._head.together and len(feeds) > 1:
            return mx.concatenate([self.hidden([feed]) for feed in feeds])
        segments = [Segment(f.text.row, f.text.length, f.count, f.count > _LONG) for f in feeds]
        tokens = mx.concatenate([feed.tokens for feed in feeds])
        features = mx.concatenate([feed.features for feed in feeds])
        if self.numpy is not None and len(tokens) <= MOST_ROWS:
            hidden = self.numpy.hidden(tokens, features, segments, self._caches)
        else:
            self._frame.begin(segments)
            hidden = self._head(tokens[None], features[None], self._caches)[0]
        for feed in feeds:
            feed.text.length += feed.count
        return hidden


class MaskedPairKVCache(PairKVCache):
    """The texts of a head that is also fed pairs of a mask."""

    def __init__(self, head: MaskedHead, numpy: NumpyHead | None = None) -> None:
        super().__init__(head, numpy)
        self._masked = head

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads all feeds, in the order of their rows; returns the vectors of `depths` tokens after each [sum, H]."""
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
