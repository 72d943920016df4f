"""A head's keys and values of all its texts, and forwards over pairs or features of several texts.

Texts share forwards as the target's do, in rows of flat buffers (`engine.flat`). ONNX Runtime or MLX computes; the
former is not lazy. A head's token trees are fed through `kv_rows`, in the target's process and in a draft worker alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import BlockHead, PairHead
from outrider.engine.cache import FlatRows
from outrider.engine.flat import Ints, NodeSegment, Segment
from outrider.engine.kv_rows import Array, Row
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import MIN_PREFIX_TOKENS, SavedPrefix
from outrider.engine.steps import Step

MAX_BUFFERED = 2048


class PairKVCache(FlatRows):
    """The texts of a head that is fed pairs; a text's `length` is the number of pairs read.

    `cpu` computes its forwards; None: MLX does.
    """

    def __init__(self, head: PairHead, cpu: OrtForward | None = None) -> None:
        super().__init__(head, is_lazy=cpu is None)
        self.head, self.cpu, self.dtype = head, cpu, head.dtype

    def feed(
        self, tokens: Any, features: Any, segments: Sequence[Segment], logits_indices: Ints | None = None
    ) -> tuple[Array, mx.array]:
        """Feeds pairs, segment by segment, short ones first: tokens [T], features [T, W].

        Returns the stand-ins for the next features [R, W], and the logits [R, V], at `logits_indices`; None: at all.
        """
        if self.cpu is not None:
            rows = np.arange(len(tokens)) if logits_indices is None else logits_indices
            found = self.cpu(np.asarray(tokens), segments, self._layers, rows, features=np.asarray(features))
            return found["hidden"], mx.array(found["logits"])
        hidden = self._forward_mlx(mx.array(tokens), mx.array(features).astype(self.dtype), segments)
        if logits_indices is not None:
            hidden = mx.take(hidden, mx.array(logits_indices.astype(np.int32)), axis=0)
        return self.head.next_features(hidden), self.head.logits(hidden)

    def _forward_mlx(self, tokens: mx.array, features: mx.array, segments: Sequence[Segment]) -> mx.array:
        if self.head.together or len(segments) == 1:
            self._frame.begin(segments)
            return self.head(tokens[None], features[None], self._caches)[0]
        ends = np.cumsum([segment.count for segment in segments]).tolist()
        spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        alone = zip(spans, segments, strict=True)
        return mx.concatenate([self._forward_mlx(tokens[own], features[own], [segment]) for own, segment in alone])


@dataclass(slots=True, eq=False)
class DraftBlock:
    """A block: its first position, the known tokens from there on, and its number of slots, which predict the tokens
    after them.

    The forward that opens it sets its slots' vectors and logits, from `row` on. `step`: their scores, from row `first`
    on, if its tree has scored them all at once.
    """

    anchor: int
    tokens: Sequence[int]
    slots: int
    hidden: Array = field(init=False)
    logits: mx.array = field(init=False)
    row: int = field(init=False)
    step: Step | None = None
    first: int = 0

    @property
    def position(self) -> int:
        """The position of its last known token."""
        return self.anchor + len(self.tokens) - 1


class FeatureKVCache(FlatRows):
    """The features of a block head's texts. Blocks' own keys and values are written after them, and overwritten by the
    next blocks."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.head, self.dtype = head, head.dtype
        self.extra_masks = 0 if head.from_anchor else 1

    def read_features(self, features: mx.array, segments: Sequence[Segment]) -> None:
        """Reads features [T, W], segment by segment. Lazy."""
        self._frame.begin(segments)
        self.head.read(features[None], self._caches)

    def open_blocks(self, texts: Sequence[tuple[int, Ints, Sequence[DraftBlock]]]) -> tuple[mx.array, mx.array]:
        """Computes blocks of texts: of each text its row, the positions of its features, and its blocks.

        Returns the vectors [S, H] and the logits [S, V] of all slots, block by block. Lazy.
        """
        blocks = [block for *_, own in texts for block in own]
        known = np.array([len(block.tokens) for block in blocks], np.int32)
        lengths = known - 1 + np.array([block.slots for block in blocks], np.int32) + self.extra_masks
        mask, tokens, segments, first = self.head.mask_token, list[int](), list[Segment](), 0
        for block, count in zip(blocks, lengths.tolist(), strict=True):
            tokens += [*block.tokens, *[mask] * (count - len(block.tokens))]
        for row, features, own in texts:
            segments.append(_make_block_segment(row, features, own, lengths[first : first + len(own)]))
            first += len(own)
        self._frame.begin(segments)
        block_positions = _positions_in_blocks(lengths)
        hidden = self.head.block(mx.array(tokens, mx.int32)[None], mx.array(block_positions), self._caches)[0]
        drafting = block_positions >= (known - 1 + self.extra_masks).repeat(lengths)
        if not drafting.all():
            hidden = mx.take(hidden, mx.array(np.flatnonzero(drafting).astype(np.int32)), axis=0)
        return hidden, self.head.logits(hidden)


HeadKVCache = PairKVCache | FeatureKVCache


def _positions_in_blocks(lengths: Ints) -> Ints:
    """Returns 0, 1, ... for each block of these lengths, concatenated."""
    starts = np.cumsum(lengths) - lengths
    positions: Ints = (np.arange(lengths.sum()) - starts.repeat(lengths)).astype(np.int32)
    return positions


def _make_block_segment(row: int, features: Ints, blocks: Sequence[DraftBlock], lengths: Ints) -> Segment:
    """Returns the segment of a text's blocks, after its features at these positions. Each row sees the features before
    its block's anchor, and its block."""
    anchors = np.array([block.anchor for block in blocks], np.int32).repeat(lengths)
    number = np.arange(len(blocks)).repeat(lengths)
    seen = np.concatenate([features < anchors[:, None], number[:, None] == number], axis=1)
    all_positions = np.concatenate([features, _positions_in_blocks(lengths) + anchors])
    return NodeSegment(row, len(features), len(anchors), all_positions=all_positions, visible=seen)


@dataclass(frozen=True, slots=True)
class SavedPairs(SavedPrefix):
    """The pairs that a head read of a text, for later texts with the same beginning. `length` counts tokens: pair j
    consists of tokens j and j + 1, so a common prefix of n tokens has n - 1 usable pairs. `layers` hold the pairs from
    `begin` on; earlier features never arrived."""

    begin: int = 0

    def usable_tokens(self, length: int) -> int:
        shared = min(length, self.length)
        return shared if shared - 1 - self.begin >= MIN_PREFIX_TOKENS else 0


class FeatureBuffer:
    """The features of one text that have arrived but not been read, at the positions `begin`..`end`-1, of which only
    the newest `max_rows` are kept."""

    def __init__(self, max_rows: int = MAX_BUFFERED) -> None:
        self.begin = self.end = 0
        self._max_rows = max_rows
        self._rows = dict[int, Row]()  # by position

    def add(self, position: int, rows: Array) -> None:
        """Adds rows from `position` on. Known ones are skipped; after a gap only the new ones are kept."""
        if position > self.end:
            self._rows, self.begin, self.end = {}, position, position
        end = max(self.end, position + rows.shape[0])
        self._rows |= {place: (rows, place - position) for place in range(self.end, end)}
        self.end = end
        self.forget(end - self._max_rows)

    def forget(self, position: int) -> None:
        """Drops the rows before this position."""
        for place in range(self.begin, min(position, self.end)):
            del self._rows[place]
        self.begin = max(self.begin, min(position, self.end))

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    @property
    def count(self) -> int:
        return self.end - self.begin

    def rows(self, begin: int, end: int) -> list[Row]:
        """Returns the rows of these positions, all of which the buffer has."""
        return [self._rows[position] for position in range(begin, end)]
