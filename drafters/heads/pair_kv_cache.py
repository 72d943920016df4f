"""A head's keys and values of all its texts, and forwards over pairs or features of several texts.

Texts share forwards as the target's do, in rows of flat buffers (`engine.flat`). The chains of a head in the target's
process and its token trees in a draft worker are fed in the same way. ONNX Runtime or MLX computes; the former is not
lazy.

`FeatureFollower` collects the features of one text in the target's process. The target's slot reports the features of
committed tokens as they are computed; they are read when a draft is first requested, so plain decoding only costs their
storage. Only the newest of many are kept. If some are missing, reading begins after the gap: positions count from
there, and the head sees less of the text. For a prompt in the target's prompt cache, the head uses its own prompt
cache, or begins after it. An early exit needs no features, and its text is the target's (`ExitFollower`).

`SavedPairs` holds the pairs that a head read of a text, for later texts with the same beginning. Pair j consists of
tokens j and j + 1, so a common prefix of n tokens has n - 1 usable pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import BlockHead, Head, MaskedHead, PairHead
from outrider.engine.flat import FlatRows, FlatSequence, Floats, Ints, NodeSegment, Segment
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import LEAST, CachedPrefix, PromptCache, SavedPrefix
from outrider.engine.sampling import Sampler

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


class PairKVCache(FlatRows):
    """The texts of a head that is fed pairs; a text's `length` is the number of pairs read.

    `cpu` computes its forwards; None: MLX does.
    """

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
            found = self.cpu(np.asarray(tokens), segments, self._layers, places, features=np.asarray(features))
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

    def read(self, feeds: Sequence[PairFeed]) -> None:
        """Reads pairs without drafting after them. Lazy, unless ONNX Runtime computes."""
        self.outputs(feeds, [1] * len(feeds))

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Reads all feeds, in the order of their rows, and masks for more than one token after a feed.

        Returns the vectors [sum, H] and the logits [sum, V] of `depths` tokens after each. Lazy, unless ONNX Runtime
        computes.
        """
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


@dataclass(frozen=True, slots=True)
class OpenedBlock:
    """A block to open: its first position, the known tokens from there on, and its number of slots."""

    anchor: int
    tokens: Sequence[int]
    slots: int


class FeatureKVCache(FlatRows):
    """The features of a block head's texts. Blocks' own keys and values are written after them, and overwritten by the
    next blocks."""

    def __init__(self, head: BlockHead, from_anchor: bool | None = None) -> None:
        """`from_anchor` overrides the head's own setting."""
        super().__init__(head)
        self.head = head
        self.masks_more = 0 if (head.from_anchor if from_anchor is None else from_anchor) else 1

    def read(self, feeds: Sequence[PairFeed]) -> None:
        """The same as `PairKVCache.read`. Lazy."""
        segments = [Segment(feed.text.row, feed.text.length, feed.count) for feed in feeds]
        self.read_features(mx.concatenate([feed.features for feed in feeds]), segments)
        for feed in feeds:
            feed.text.length += feed.count

    def read_features(self, features: mx.array, segments: Sequence[Segment]) -> None:
        """Reads features [T, W], segment by segment. Lazy."""
        self._frame.begin(segments)
        self.head.read(features[None], self._caches)

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
        """The same as `PairKVCache.slots`."""
        self.read(feeds)
        texts = []
        for feed, depth in zip(feeds, depths, strict=True):
            end, last = feed.text.length, np.asarray(feed.tokens)[-1:].tolist()
            texts.append((feed.text.row, np.arange(end, dtype=np.int32), [OpenedBlock(end, last, depth)]))
        return self.open_blocks(texts)

    def open_blocks(self, texts: Sequence[tuple[int, Ints, Sequence[OpenedBlock]]]) -> tuple[mx.array, mx.array]:
        """Computes blocks of texts: of each text its row, the positions of its features, and its blocks.

        Returns the vectors [S, H] and the logits [S, V] of all slots, block by block. Lazy.
        """
        blocks = [block for *_, own in texts for block in own]
        known = np.array([len(block.tokens) for block in blocks], np.int32)
        lengths = known - 1 + np.array([block.slots for block in blocks], np.int32) + self.masks_more
        mask, tokens, segments, first = self.head.mask_token, list[int](), list[Segment](), 0
        for block, count in zip(blocks, lengths.tolist(), strict=True):
            tokens += [*block.tokens, *[mask] * (count - len(block.tokens))]
        for row, features, own in texts:
            segments.append(_segment(row, features, own, lengths[first : first + len(own)]))
            first += len(own)
        self._frame.begin(segments)
        places = _places_in(lengths)
        hidden = self.head.block(mx.array(tokens, mx.int32)[None], mx.array(places), self._caches)[0]
        drafting = places >= (known - 1 + self.masks_more).repeat(lengths)
        if not drafting.all():
            hidden = mx.take(hidden, mx.array(np.flatnonzero(drafting).astype(np.int32)), axis=0)
        return hidden, self.head.logits(hidden)


HeadKVCache = PairKVCache | FeatureKVCache


def kv_cache_of(head: Head, cpu: OrtForward | None = None) -> HeadKVCache:
    """Returns the KV cache of a head's kind; `cpu` computes its forwards."""
    return FeatureKVCache(head) if isinstance(head, BlockHead) else PairKVCache(head, cpu)


def _places_in(lengths: Ints) -> Ints:
    """Returns 0, 1, ... for each block of these lengths, concatenated."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = (np.arange(lengths.sum()) - starts.repeat(lengths)).astype(np.int32)
    return places


def _segment(row: int, features: Ints, blocks: Sequence[OpenedBlock], lengths: Ints) -> Segment:
    """Returns the segment of a text's blocks, after its features at these positions. Each row sees the features before
    its block's anchor, and its block."""
    count = len(features)
    if len(blocks) == 1 and blocks[0].anchor == count == features.max(initial=-1) + 1:
        return Segment(row, count, int(lengths[0]), whole=True)
    anchors = np.array([block.anchor for block in blocks], np.int32).repeat(lengths)
    number = np.arange(len(blocks)).repeat(lengths)
    seen = np.concatenate([features < anchors[:, None], number[:, None] == number], axis=1)
    places = np.concatenate([features, _places_in(lengths) + anchors])
    return NodeSegment(row, count, len(anchors), places=places, visible=seen)


@dataclass(frozen=True, slots=True)
class SavedPairs(SavedPrefix):
    """`length` counts tokens. `layers` hold the pairs from `begin` on; earlier features never arrived."""

    begin: int = 0

    def serves(self, length: int) -> int:
        shared = min(length, self.length)
        return shared if shared - 1 - self.begin >= LEAST else 0

    def up_to(self, position: int) -> CachedPrefix:
        """Returns the pairs before this position in the form that the head's texts begin with."""
        count = position - self.begin
        return CachedPrefix(SavedPrefix(count, tuple(self.columns(count))), count)


MOST_WAITING = 2048
PIECE = 512
READ_AGAIN = 16  # cached tokens that the target reads again, so that the head can continue its own prefix

Features = mx.array | Floats
Row = tuple[Features, int]
"""An array [N, W] and the index of one of its rows."""


class FeatureBuffer:
    """The features of the positions `begin`..`end`-1, of which only the newest `most` are kept."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self.begin = self.end = 0
        self._most = most
        self._parts = deque[tuple[int, Features]]()

    def add(self, position: int, rows: Features) -> None:
        """Adds rows from `position` on. Known ones are skipped; after a gap only the new ones are kept."""
        end = position + rows.shape[0]
        if end <= self.end:
            return
        if not self.begin <= position <= self.end:
            self.begin, self._parts = position, deque()
        elif position < self.end:
            position, rows = self.end, rows[self.end - position :]
        self._parts.append((position, rows))
        self.end = end
        self.forget(end - self._most)

    def forget(self, position: int) -> None:
        """Drops the rows before this position."""
        if position > self.begin:
            self.begin = min(position, self.end)
            while self._parts and self._parts[0][0] + self._parts[0][1].shape[0] <= position:
                self._parts.popleft()

    def __contains__(self, position: int) -> bool:
        return self.begin <= position < self.end

    def row(self, position: int) -> Row:
        """Returns the row of a position that the buffer has."""
        first, rows = next(part for part in self._parts if part[0] <= position < part[0] + part[1].shape[0])
        return rows, position - first

    def between(self, begin: int, end: int) -> Any:
        """Returns the rows [end - begin, W] of these positions, all of which the buffer has."""
        parts: list[Any] = [
            rows[max(begin - first, 0) : max(end - first, 0)]
            for first, rows in self._parts
            if first < end and begin < first + rows.shape[0]
        ]
        xp: Any = mx if isinstance(parts[0], mx.array) else np
        return parts[0] if len(parts) == 1 else xp.concatenate(parts)


class FeatureFollower:
    """The features of one text. `sampler` chooses its tokens; `reach`: the number of newest features that matter."""

    def __init__(
        self, texts: HeadKVCache, sampler: Sampler, reach: int | None = None, cache: PromptCache | None = None
    ) -> None:
        """`cache` is the head's prompt cache."""
        self.sampler = sampler
        self._kv_cache, self._cache = texts, cache
        self._text: FlatSequence | None = None
        self._features = FeatureBuffer(reach or MOST_WAITING)  # those that are not read
        self._begin = 0  # the position of the first pair
        self._start: CachedPrefix | None = None  # the cached prefix that it begins with
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of features to read."""
        return self._features.end - self._features.begin

    def begin(self, tokens: Sequence[int], length: int, exact: bool) -> int:
        """Returns the position from which the target should report features; it has the first `length` tokens cached.

        `exact`: the target can drop some of them and read them again.
        """
        cached = self._cache.find(tokens) if self._cache is not None else None
        if cached is None or not isinstance(cached.saved, SavedPairs):
            return length
        count = min(cached.length - 1, length)
        if count <= cached.saved.begin or count < length - (READ_AGAIN if exact else 0):
            return length
        self._features.begin = self._features.end = count
        self._begin, self._start = cached.saved.begin, cached.saved.up_to(count)
        return count

    def add_features(self, position: int, features: mx.array) -> None:
        """Adds the features [R, W] of committed tokens from `position` on. After a gap, reading starts again."""
        begin = self._features.begin
        if not self._closed:
            self._features.add(position, features)
        if self._features.begin != begin:
            self._restart()

    @property
    def text(self) -> FlatSequence:
        """The text in the head's KV cache."""
        if self._text is None:
            self._text = self._kv_cache.open()
            if self._start is not None:
                self._kv_cache.adopt(self._text, self._start)
                self._start = None
        return self._text

    @property
    def length(self) -> int:
        """The number of pairs read."""
        return self._text.length if self._text is not None else 0

    def is_up_to(self, tokens: Sequence[int]) -> bool:
        """Whether it has the features of all but the last of these tokens, and some of them are unread."""
        return not self._closed and self._features.end == len(tokens) - 1 and self.waiting > 0

    def catch_up(self, tokens: Sequence[int]) -> PairFeed:
        """Reads the unread pairs of committed `tokens` except the last piece, which it returns.

        Call `has_read` when that was fed.
        """
        while self.waiting > PIECE:
            self._kv_cache.read([self._feed(tokens, PIECE)])
            mx.eval(self._kv_cache.state())
            self._features.forget(self._features.begin + PIECE)
        return self._feed(tokens, self.waiting)

    def has_read(self) -> None:
        """Records that the piece that `catch_up` returned was fed."""
        self._features.forget(self._features.end)

    def _feed(self, tokens: Sequence[int], count: int) -> PairFeed:
        begin = self._features.begin
        behind = mx.array(list(tokens[begin + 1 : begin + 1 + count]), mx.int32)
        return PairFeed(self.text, behind, self._features.between(begin, begin + count))

    def lendable(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the first of these committed tokens, whose pairs have all been read; none if it began after a gap."""
        return tokens[: self.length + 1] if self.length and not self._begin else ()

    def save(self, length: int) -> SavedPairs:
        """Returns a copy of the pairs of the first `length` tokens."""
        pairs = self._kv_cache.save(self.text, length - 1 - self._begin)
        return SavedPairs(length, pairs.layers, begin=self._begin)

    def read_all(self, tokens: Sequence[int]) -> int:
        """Reads the unread pairs of committed `tokens`. Returns the number of tokens read; 0: none to keep."""
        if self._text is None or self._features.end >= len(tokens):
            return 0
        if self.waiting:
            self._kv_cache.read([self.catch_up(tokens)])
            self.has_read()
        return self._features.end + 1

    def close(self) -> None:
        """Ignores further features, and frees the text in the KV cache."""
        self._closed = True
        self.has_read()
        self._restart()

    def _restart(self) -> None:
        if self._text is not None:
            self._kv_cache.close(self._text)
        self._text, self._start, self._begin = None, None, self._features.begin


class ExitFollower(FeatureFollower):
    """A text of the target, fed except for its last token, for a drafter that needs no features."""

    def __init__(self, texts: HeadKVCache, sampler: Sampler, sequence: FlatSequence) -> None:
        super().__init__(texts, sampler)
        self._text = sequence

    def is_up_to(self, tokens: Sequence[int]) -> bool:
        return not self._closed and self.length == len(tokens) - 1

    def catch_up(self, tokens: Sequence[int]) -> PairFeed:
        """Returns the last token, whose keys and values the verify computes again."""
        return PairFeed(self.text, mx.array(list(tokens[-1:]), mx.int32), mx.zeros((1, 0)), stays=False)

    def close(self) -> None:
        """Ends drafting; the text remains the target's."""
        self._closed = True
