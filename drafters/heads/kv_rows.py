"""The columns of a head's token trees (`engine.kv_rows.KVRows`), fed with features and pairs of features and tokens.

A few committed pairs, and all features, are read by the forward of the next tokens. Knows columns and rows; nothing of
nodes or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import finalize

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.layers import BlockLink
from outrider.drafters.heads.pair_kv_cache import (
    DraftBlock,
    FeatureBuffer,
    FeatureKVCache,
    HeadKVCache,
    PairKVCache,
    SavedPairs,
)
from outrider.engine.flat import Ints, NodeSegment, Segment
from outrider.engine.kv_rows import Array, KVRows, NewRows, Row, gather_rows, join_arrays
from outrider.engine.prompt_cache import SavedPrefix

_READ_CHUNK_TOKENS = 512
MAX_PENDING_PAIRS = 32  # more committed pairs are read as a prompt is: other texts would be padded to their number


class FeatureKVRows(KVRows):
    """The columns of one text in the head's KV cache. `features`: those that are not read."""

    def __init__(self, kv_cache: HeadKVCache, features: FeatureBuffer) -> None:
        self.kv_cache, self.sequence, self.features = kv_cache, kv_cache.open(), features
        finalize(self, kv_cache.drop, self.sequence)

    def close(self) -> None:
        self.kv_cache.close(self.sequence)


class PairKVRows(FeatureKVRows):
    """The columns of pairs of one text, lazy unless ONNX Runtime computes. The first column is at `origin`.

    A pair has the feature of the target, if that has arrived, or else a stand-in. A masked head has learned one
    stand-in for any feature; for other heads it is the head's vector of the pair before, so consecutive tokens without
    features are fed one a forward.
    """

    kv_cache: PairKVCache

    def __init__(self, kv_cache: PairKVCache, features: FeatureBuffer) -> None:
        super().__init__(kv_cache, features)
        self.lazy, mask = kv_cache.cpu is None, kv_cache.head.mask_feature
        self._missing: Row | None = None if mask is None else (mask, 0)
        self.restart_at(0)

    def restart_at(self, origin: int) -> None:
        """Drops everything; the text is read from this position on."""
        self.origin, self.sequence.length = origin, 0
        self._unread: list[tuple[int, Row]] = []  # the last committed tokens and their features
        self._stand_ins: dict[int, Row] = {}  # by column: the stand-in for the feature of its token
        self._guessed: dict[int, int] = {}  # by column that was fed a stand-in: the position of the missing feature

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features of committed tokens from `position` on."""
        self.features.add(position, np.array(rows, np.float32))

    def is_stale(self, column: int) -> bool:
        """Whether it was fed a stand-in for a feature that has arrived since."""
        return column in self._guessed and self._guessed[column] in self.features

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        """Implements `KVRows.prefill`, for all `tokens`, whose features have arrived. A few wait for the next
        forward."""
        self.sequence.length = start - len(self._unread)
        before = self.origin + start - 1
        self._unread += zip(tokens, self.features.rows(before, before + len(tokens)), strict=True)
        if len(self._unread) > MAX_PENDING_PAIRS:
            self.read_rest()
        return len(tokens)

    def read_rest(self) -> None:
        """Reads the committed tokens that wait for the next forward."""
        while self._unread:
            piece, rest = self._unread[:_READ_CHUNK_TOKENS], self._unread[_READ_CHUNK_TOKENS:]
            tokens, features = zip(*piece, strict=True)
            segment = Segment(self.sequence.row, self.sequence.length, len(piece), long=True)
            fed = np.array(tokens, np.int32), gather_rows(features, self.kv_cache.dtype)
            self.kv_cache.feed(*fed, [segment], np.array([len(piece) - 1]))
            mx.eval(self.kv_cache.state())
            self.sequence.length, self._unread = segment.end, rest

    def save(self, count: int) -> SavedPrefix:
        """Returns a copy of the pairs of the first `count` tokens."""
        self.read_rest()
        return SavedPairs(count, self.kv_cache.save(self.sequence, count - self.origin).layers, begin=self.origin - 1)

    @staticmethod
    def forward(texts: Sequence[PairKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`. All texts share forwards: one for each consecutive token without a feature."""
        runs = [text._runs(rows) for text, rows in zip(texts, new, strict=True)]
        found: list[list[Row]] = [[] for _ in texts]
        for number in range(max(map(len, runs))):
            batch, fed = PairBatch(), [(n, own[number]) for n, own in enumerate(runs) if number < len(own)]
            for n, run in fed:
                texts[n]._add(batch, new[n], run)
            next_features, logits = batch.feed(texts[0].kv_cache)
            for index, (n, row) in enumerate((n, row) for n, run in fed for row in run):
                texts[n]._stand_ins[new[n].start + row] = next_features, index
                found[n].append((logits, index))
        for text, rows in zip(texts, new, strict=True):
            text._unread, text.sequence.length = [], rows.end
        return gather([row for own in found for row in own])

    def _runs(self, new: NewRows) -> list[range]:
        """Divides the tokens into runs, one for each forward: a token without a feature needs the stand-in of the one
        before it, from an earlier forward."""
        starts = [0]
        for row, (parent, place) in enumerate(zip(new.parents, new.positions[new.start :].tolist(), strict=True)):
            known = self._missing is not None or self.origin + place - 1 in self.features
            if not known and parent >= new.start + starts[-1]:
                starts.append(row)
        return [range(*run) for run in pairwise([*starts, len(new.parents)])]

    def _add(self, batch: PairBatch, new: NewRows, run: range) -> None:
        """Adds a run of the new tokens; before the first one, the committed tokens that wait."""
        unread = [] if run.start else self._unread
        start, end = new.start + run.start - len(unread), new.start + run.stop
        row, seen = self.sequence.row, new.seen[run.start : run.stop, :end]
        segment = Segment(row, start, end - start)
        if len(run) > 1 or not seen.all():
            seen = np.concatenate([np.tri(len(unread), end, start, dtype=np.bool_), seen])
            segment = NodeSegment(row, start, end - start, all_positions=new.positions[:end], visible=seen)
        tokens: Any = new.tokens[run.start : run.stop]
        batch.segments.append(segment)
        batch.add(np.array([token for token, _ in unread], np.int32), [row for _, row in unread], with_logits=False)
        batch.add(
            tokens if isinstance(tokens, mx.array) else np.array(tokens, np.int32), [self._feature(new, r) for r in run]
        )

    def _feature(self, new: NewRows, row: int) -> Row:
        """Returns the feature for a new token."""
        column = row + new.start
        before = self.origin + int(new.positions[column]) - 1
        if before in self.features:
            self._guessed.pop(column, None)
            return self.features.rows(before, before + 1)[0]
        self._guessed[column] = before
        return self._missing or self._stand_ins[new.parents[row]]

    def keep(self, prefix: int, columns: Ints) -> None:
        self.sequence.keep(prefix, columns)
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._stand_ins = {kept[old]: row for old, row in self._stand_ins.items() if old in kept}
        self._guessed = {kept[old]: place for old, place in self._guessed.items() if old in kept}


class PairBatch:
    """Pairs of several texts for one forward, segment by segment."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._tokens: list[Any] = []
        self._features: list[Row] = []
        self._logits_indices: list[int] = []

    def add(self, tokens: Any, features: Sequence[Row], with_logits: bool = True) -> None:
        """Adds pairs to the last segment; `with_logits`: their logits are computed."""
        first = len(self._features)
        self._features += features
        self._tokens += [tokens] if features else []
        self._logits_indices += range(first, len(self._features)) if with_logits else ()

    def feed(self, kv_cache: PairKVCache) -> tuple[Array, mx.array]:
        """Returns the stand-ins for the next features, and the logits of pairs added `with_logits`."""
        every = len(self._logits_indices) == len(self._features)
        indices = None if every else np.array(self._logits_indices, np.int32)
        return kv_cache.feed(
            join_arrays(self._tokens, mx.int32), gather_rows(self._features, kv_cache.dtype), self.segments, indices
        )


def gather(rows: Sequence[Row]) -> mx.array:
    """Returns the rows as one array [T, W]."""
    return mx.array(gather_rows(rows))


@dataclass(frozen=True, slots=True, eq=False)
class BlockSlot:
    """A block's slot `index`, which predicts the token after position `block.position + index`."""

    block: DraftBlock
    index: int = 0


def opened_blocks(new: NewRows) -> list[DraftBlock]:
    """Returns the blocks that new tokens open: the first slot of each follows a token, others the slot before."""
    return [slot.block for slot in new.slots if slot.index == 0]


class SlotKVRows(FeatureKVRows):
    """Columns that are slots of the tokens that were fed, maybe with a `link` between the tokens of a block.

    A token given by the caller opens a block, which also has slots for the next tokens, so that continuing with the
    block's own choice needs no forward. All blocks that are opened together, of all texts, share a forward.
    """

    link: BlockLink | None = None

    def __init__(self, kv_cache: Any, features: FeatureBuffer) -> None:
        super().__init__(kv_cache, features)
        self._slots: dict[int, BlockSlot] = {}

    def next_slot(self, column: int) -> BlockSlot | None:
        """Returns the next slot of this column's block, after the block's own choice; None after the last one."""
        slot = self._slots[column]
        return BlockSlot(slot.block, slot.index + 1) if slot.index + 1 < slot.block.slots else None

    def keep(self, prefix: int, columns: Ints) -> None:
        super().keep(prefix, columns)
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._slots = {kept[old]: slot for old, slot in self._slots.items() if old in kept}

    @staticmethod
    def _logits(texts: Sequence[Any], new: Sequence[Any], hidden: Array, logits: mx.array) -> mx.array:
        """Returns the logits after all new tokens [R, V], by the vectors and logits of the opened blocks' slots."""
        row = 0
        for text, rows in zip(texts, new, strict=True):
            text._slots.update(enumerate(rows.slots, rows.start))
            for block in opened_blocks(rows):
                block.hidden, block.logits, block.row = hidden, logits, row
                row += block.slots
        slots = [slot for rows in new for slot in rows.slots]
        return gather([(slot.block.logits, slot.block.row + slot.index) for slot in slots])


class MaskedKVRows(SlotKVRows, PairKVRows):
    """The pairs of one text, and one block of masks after the committed ones, which the next read overwrites."""

    @staticmethod
    def forward(texts: Sequence[Any], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`. A token that opens a block is the last of the committed text."""
        batch, nothing = PairBatch(), mx.zeros((0, 0))
        for text, rows in zip(texts, new, strict=True):
            for row, slot in enumerate(rows.slots):
                if slot.index:
                    continue
                text._add(batch, rows, range(row, row + 1))
                masks = slot.block.slots - 1
                batch.add(np.full(masks, text.kv_cache.head.mask_token, np.int32), [text._missing] * masks)
                batch.segments[-1] = replace(batch.segments[-1], count=batch.segments[-1].count + masks)
        found = batch.feed(texts[0].kv_cache) if batch.segments else (nothing, nothing)
        for text, rows in zip(texts, new, strict=True):
            text._unread, text.sequence.length = [], rows.end
        return SlotKVRows._logits(texts, new, *found)


class BlockKVRows(SlotKVRows):
    """The features of one text, which keep their positions, so missing ones only leave a gap.

    A block follows the features of all tokens before its first token, its *anchor*. It consists of the known tokens
    from the anchor on, then masks; each mask's slot (or that of the token before it) drafts the token there.
    """

    kv_cache: FeatureKVCache

    def __init__(self, kv_cache: FeatureKVCache, features: FeatureBuffer) -> None:
        super().__init__(kv_cache, features)
        self.depth, self.link = kv_cache.head.depth, kv_cache.head.link
        self.feature_positions: Ints = np.zeros(0, np.int32)  # of the features that have been read

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features of committed tokens from `position` on that are new. Reads and evaluates them if there are
        many, or some are missing before them."""
        if position > self.features.end:
            self.read_rest()
        self.features.add(position, rows)
        if self.features.count >= _READ_CHUNK_TOKENS:
            self.read_rest()

    def read_rest(self) -> None:
        """Reads the features that wait for the next forward."""
        _read_waiting_features([self])
        mx.eval(self.kv_cache.state())

    def save(self, count: int) -> SavedPrefix:
        """Returns a copy of the features before the last of the first `count` tokens; none are missing in between."""
        self.read_rest()
        begin = int(self.feature_positions[0])
        return SavedPairs(count, self.kv_cache.save(self.sequence, count - 1 - begin).layers, begin=begin)

    def anchor(self, position: int) -> int:
        """Returns where a block begins whose last known token is at `position`.

        That is the first token without a feature, or later if the block would have no slot left.
        """
        return max(min(self.features.end, position), position - self.depth + 1)

    def max_draft_tokens(self, position: int) -> int:
        """Returns the maximum number of tokens that such a block drafts."""
        return self.depth - max(position - self.features.end, 0)

    def is_stale(self, column: int) -> bool:
        """Whether features have arrived for tokens that its block read without them."""
        slot = self._slots[column]
        return slot.block.anchor < min(self.features.end, slot.block.position + slot.index)

    @staticmethod
    def forward(texts: Sequence[BlockKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`: reads the features that have arrived, then opens all blocks."""
        _read_waiting_features(texts)
        opened = [(text, opened_blocks(rows)) for text, rows in zip(texts, new, strict=True)]
        blocks = [(text.sequence.row, text.feature_positions, own) for text, own in opened if own]
        nothing = mx.zeros((0, 0))
        found = texts[0].kv_cache.open_blocks(blocks) if blocks else (nothing, nothing)
        return SlotKVRows._logits(texts, new, *found)


def _read_waiting_features(texts: Sequence[BlockKVRows]) -> None:
    """Reads the waiting features of all texts in one forward. Lazy."""
    behind, segments, features = [text for text in texts if text.features.count], [], []
    for text in behind:
        own = np.arange(text.features.begin, text.features.end, dtype=np.int32)
        rows = text.features.rows(text.features.begin, text.features.end)
        row, start, unseen = text.sequence.row, len(text.feature_positions), np.zeros((len(own), 0), np.bool_)
        text.feature_positions = np.concatenate([text.feature_positions, own])
        segments.append(NodeSegment(row, start, len(own), all_positions=text.feature_positions, visible=unseen))
        features.append(gather(rows).astype(text.kv_cache.dtype))
    if segments:
        behind[0].kv_cache.read_features(mx.concatenate(features), segments)
    for text in behind:
        text.features.forget(text.features.end)
        text.sequence.length = len(text.feature_positions)
