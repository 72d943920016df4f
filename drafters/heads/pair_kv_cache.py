"""A head's keys and values of all its texts, and forwards over pairs or features of several texts.

Texts share forwards as the target's do, in rows of flat buffers (`engine.flat`). The chains of a head in the target's
process and its token trees in a draft worker are fed in the same way. ONNX Runtime or MLX computes; the former is not
lazy. Knows pairs, blocks and hidden vectors; nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import BlockHead, MaskedHead, PairHead
from outrider.engine.flat import FlatRows, FlatSequence, Ints, Segment
from outrider.engine.ort.forward import OrtForward

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
        """Reads pairs without drafting after them. Lazy, unless ONNX Runtime computes."""
        raise NotImplementedError

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Reads all feeds, in the order of their rows, and masks for more than one token after a feed.

        Returns the vectors [sum, H] and the logits [sum, V] of `depths` tokens after each. Lazy, unless ONNX Runtime
        computes.
        """
        raise NotImplementedError


class PairKVCache(HeadKVCache):
    """The texts of a head that is fed pairs. `cpu` computes its forwards; None: MLX does."""

    def __init__(self, head: PairHead, cpu: OrtForward | None = None) -> None:
        # ONNX Runtime's bindings belong to the buffers, so new ones for each text would make rounds slower.
        super().__init__(head, keeps_buffers=cpu is not None)
        self.head, self.cpu = head, cpu

    def feed(
        self, tokens: Any, features: Any, segments: Sequence[Segment], wanted: Ints | None = None
    ) -> tuple[mx.array, mx.array]:
        """Feeds pairs, segment by segment, short ones first: tokens [T], features [T, W].

        Returns the hidden vectors [R, H] and the logits [R, V] of the `wanted` ones; None: all.
        """
        if self.cpu is not None:
            places = np.arange(len(tokens)) if wanted is None else wanted
            found = self.cpu.over(np.asarray(tokens), segments, self._layers, places, features=np.asarray(features))
            return mx.array(found["hidden"]), mx.array(found["logits"])
        hidden = self._by_mlx(mx.array(tokens), mx.array(features), segments)
        if wanted is not None:
            hidden = mx.take(hidden, mx.array(wanted.astype(np.int32)), axis=0)
        return hidden, self.head.logits(hidden)

    def _by_mlx(self, tokens: mx.array, features: mx.array, segments: Sequence[Segment]) -> mx.array:
        if self.head.together or len(segments) == 1:
            self._frame.begin(segments)
            return self.head(tokens[None], features[None], self._caches)[0]
        ends = np.cumsum([segment.count for segment in segments]).tolist()
        spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        alone = zip(spans, segments, strict=True)
        return mx.concatenate([self._by_mlx(tokens[own], features[own], [segment]) for own, segment in alone])

    def read(self, feed: PairFeed) -> None:
        self.outputs([feed], [1])

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
        pairs = zip(feeds, depths, strict=True)
        return self.outputs([self._with_masks(feed, depth - 1) for feed, depth in pairs], depths)

    def _with_masks(self, feed: PairFeed, count: int) -> PairFeed:
        if not count or not isinstance(self.head, MaskedHead):
            return feed
        tokens = mx.full((count,), self.head.mask_token, mx.int32)
        features = mx.repeat(self.head.mask_feature, count, axis=0)
        return PairFeed(feed.text, mx.concatenate([feed.tokens, tokens]), mx.concatenate([feed.features, features]))

    def outputs(self, feeds: Sequence[PairFeed], counts: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Reads all feeds, in the order of their rows.

        Returns the hidden vectors [sum, H] and the logits [sum, V] of each one's last `counts` pairs.
        """
        order = sorted(range(len(feeds)), key=lambda number: feeds[number].count > _LONG)
        own = [feeds[number] for number in order]
        ends = dict(zip(order, np.cumsum([feed.count for feed in own]).tolist(), strict=True))
        wanted = np.concatenate([np.arange(ends[n] - count, ends[n]) for n, count in enumerate(counts)])
        segments = [Segment(f.text.row, f.text.length, f.count, f.count > _LONG) for f in own]
        tokens, features = mx.concatenate([f.tokens for f in own]), mx.concatenate([f.features for f in own])
        found = self.feed(tokens, features, segments, wanted)
        for feed in feeds:
            feed.text.length += feed.count
        return found


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

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
        self._read(feeds)
        counts = [depth + self.masks_more for depth in depths]
        texts = [feed.text for feed in feeds]
        segments = [Segment(t.row, t.length, n, whole=True) for t, n in zip(texts, counts, strict=True)]
        masks = [mx.full((count - 1,), self.head.mask_token, mx.int32) for count in counts]
        tokens = [part for feed, own in zip(feeds, masks, strict=True) for part in (feed.tokens[-1:], own)]
        known = np.ones(len(counts), np.int32)
        hidden = self.block(mx.concatenate(tokens), np.array(counts, np.int32), known, segments)
        return hidden, self.head.logits(hidden)

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
