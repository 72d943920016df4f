"""A head's keys and values of all its texts, and forwards over pairs or features of several texts, by MLX or by numpy.

Texts share forwards as the target's do, in rows of flat buffers (`engine.flat`). The chains of a head in the target's
process and its token trees in a draft worker are fed in the same way. Knows pairs, blocks and hidden vectors; nothing
of sampling.

`NumpyHead` computes forwards of few pairs by numpy, over the same buffers, for MTP and EAGLE-3 heads (P-EAGLE's too)
with Llama's or Qwen3's layers. It is not lazy. `load` checks at load that it agrees with MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import BlockHead, MaskedHead, PairHead
from outrider.engine.flat import FlatCache, FlatRows, FlatSequence, Floats, Ints, Segment
from outrider.engine.numpy_net import MOST_ROWS, NumpyLayer, spans
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

    def hidden(
        self, tokens: Ints, features: Floats, segments: Sequence[Segment], caches: Sequence[FlatCache]
    ) -> Floats:
        """Returns the hidden vectors [T, H] of pairs, segment by segment."""
        angles = self.rope.on_host(np.concatenate([segment.positions for segment in segments]))
        first, *others = zip(self.layers, spans(self.layers, segments, caches), strict=True)
        with np.errstate(all="ignore"):  # closed gates underflow; the caller checks that vectors are finite
            x, attended = self.begin(tokens, features)
            x = first[0].behind(x, attended, angles, first[1])
            for layer, own in others:
                x = layer(x, angles, own)
        return x

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
        self.head, self.numpy = head, numpy

    def vectors(self, tokens: Any, features: Any, segments: Sequence[Segment]) -> Any:
        """Feeds pairs, segment by segment, short ones first: tokens [T], features [T, W].

        Returns their hidden vectors [T, H], in numpy if numpy computes them, else lazy.
        """
        if self.numpy is not None and len(tokens) <= MOST_ROWS:
            return self.numpy.hidden(np.asarray(tokens), np.asarray(features), segments, self._layers)
        tokens, features = _on_device(tokens), _on_device(features)
        if self.head.together or len(segments) == 1:
            self._frame.begin(segments)
            return self.head(tokens[None], features[None], self._caches)[0]
        ends = np.cumsum([segment.count for segment in segments]).tolist()
        spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        alone = zip(spans, segments, strict=True)
        return mx.concatenate([self.vectors(tokens[own], features[own], [segment]) for own, segment in alone])

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
        segments = [Segment(f.text.row, f.text.length, f.count, f.count > _LONG) for f in feeds]
        tokens = mx.concatenate([feed.tokens for feed in feeds])
        hidden = _on_device(self.vectors(tokens, mx.concatenate([feed.features for feed in feeds]), segments))
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


class FeatureKVCache(HeadKVCache):
    """The features of a block head's texts. Blocks' own keys and values are written after them, and overwritten by the
    next blocks."""

    def __init__(self, head: BlockHead, from_anchor: bool | None = None) -> None:
        """`from_anchor` overrides the head's own setting."""
        super().__init__(head)
        self.head = head
        self.masks_more = 0 if (head.from_anchor if from_anchor is None else from_anchor) else 1

    def read(self, feed: PairFeed) -> None:
        self._read([feed])

    def read_features(self, features: mx.array, segments: Sequence[Segment]) -> None:
        """Reads features [T, W], segment by segment. Lazy."""
        self._frame.begin(segments)
        self.head.read(features[None], self._caches)

    def block(self, tokens: mx.array, lengths: Ints, known: Ints, segments: Sequence[Segment]) -> mx.array:
        """Feeds blocks of these `lengths` [B]: tokens [sum], of which the first `known` [B] of each block are no masks.

        Returns the vectors of the slots that draft the tokens after these, block by block, [.., H]. Lazy.
        """
        self._frame.begin(segments)
        places = places_in(lengths)
        hidden = self.head.block(tokens[None], mx.array(places), self._caches)[0]
        drafting = places >= (known - 1 + self.masks_more).repeat(lengths)
        return (
            hidden if drafting.all() else mx.take(hidden, mx.array(np.flatnonzero(drafting).astype(np.int32)), axis=0)
        )

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads all feeds; returns the vectors of `depths` tokens after each [sum, H]."""
        self._read(feeds)
        counts = [depth + self.masks_more for depth in depths]
        texts = [feed.text for feed in feeds]
        segments = [Segment(t.row, t.length, n, whole=True) for t, n in zip(texts, counts, strict=True)]
        masks = [mx.full((count - 1,), self.head.mask_token, mx.int32) for count in counts]
        tokens = [part for feed, own in zip(feeds, masks, strict=True) for part in (feed.tokens[-1:], own)]
        return self.block(mx.concatenate(tokens), np.array(counts, np.int32), np.ones(len(counts), np.int32), segments)

    def _read(self, feeds: Sequence[PairFeed]) -> None:
        segments = [Segment(feed.text.row, feed.text.length, feed.count) for feed in feeds]
        self.read_features(mx.concatenate([feed.features for feed in feeds]), segments)
        for feed in feeds:
            feed.text.length += feed.count


def places_in(lengths: Ints) -> Ints:
    """Returns 0, 1, ... for each block of these lengths, concatenated."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = (np.arange(lengths.sum()) - starts.repeat(lengths)).astype(np.int32)
    return places


def _on_device(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)
