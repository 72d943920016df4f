"""The KV rows of a head's tree: columns of pairs, or slots of blocks, in place of a model's columns of tokens.

A pair is a token and the feature of the token before it: the target's, if that has arrived, or else a stand-in. A
masked head has learned one stand-in for any feature; for other heads it is the head's vector of the pair before, so
consecutive tokens without features are fed one a forward.

A block follows the features of all tokens before its first token, its *anchor*. It consists of the known tokens from
the anchor on, then masks; each mask's slot (or that of the token before it) drafts the token there. A token given by
the caller opens a block, which also has slots for the next tokens, so that continuing with the block's own choice needs
no forward. All blocks that are opened together, of all texts, share a forward. Features keep their positions, so
missing ones only leave a gap. Knows columns and rows; nothing of nodes or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any
from weakref import finalize

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from outrider.drafters.heads.head import NO_NUMBERS, MaskedHead
from outrider.drafters.heads.pair_kv_cache import (
    PIECE,
    FeatureBuffer,
    FeatureKVCache,
    HeadKVCache,
    OpenedBlock,
    PairKVCache,
    Row,
)
from outrider.engine.flat import Ints, NodeSegment, Segment
from outrider.engine.kv_rows import NewRows
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import ModelFault


class HeadKVRows:
    """The part of `engine.kv_rows.KVRows` that both forms share. Nothing is kept for other texts."""

    whole = False

    def __init__(self, kv_cache: HeadKVCache) -> None:
        self.kv_cache, self.sequence = kv_cache, kv_cache.open()
        finalize(self, kv_cache.drop, self.sequence)
        self._dtype: mx.Dtype = next(value.dtype for _, value in tree_flatten(kv_cache.head.parameters()))

    def save(self, count: int) -> SavedPrefix:
        """Returns an empty prefix."""
        return SavedPrefix(0, ())

    def restore(self, start: CachedPrefix) -> None:
        """Does nothing: no prefix is kept."""

    def close(self) -> None:
        self.kv_cache.close(self.sequence)


class PairKVRows(HeadKVRows):
    """`engine.kv_rows.KVRows` of one text, lazy unless ONNX Runtime computes. The first column is at `origin`."""

    kv_cache: PairKVCache

    def __init__(self, kv_cache: PairKVCache) -> None:
        super().__init__(kv_cache)
        self._head, self.lazy = kv_cache.head, kv_cache.cpu is None
        self._missing: Row | None = (self._head.mask_feature, 0) if isinstance(self._head, MaskedHead) else None
        self.features = FeatureBuffer()
        self.begin_at(0)

    def begin_at(self, origin: int) -> None:
        """Drops everything; the text is read from this position on."""
        self.origin, self.sequence.length = origin, 0
        self._stand_ins: dict[int, Row] = {}  # by column: the stand-in for the feature of its token
        self._guessed: dict[int, int] = {}  # by column that was fed a stand-in: the position of the missing feature

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features of committed tokens from `position` on."""
        self.features.add(position, np.array(rows, np.float32))

    def is_stale(self, column: int) -> bool:
        """Whether it was fed a stand-in for a feature that has arrived since."""
        return column in self._guessed and self._guessed[column] in self.features

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        """Implements `KVRows.prefill`; the features of all tokens have arrived."""
        for begin in range(start, len(tokens), PIECE):
            piece = np.array(tokens[begin : begin + PIECE], np.int32)
            before = self.origin + begin - 1
            features = mx.array(self.features.between(before, before + len(piece))).astype(self._dtype)
            segment = Segment(self.sequence.row, begin, len(piece), long=True)
            hidden, _ = self.kv_cache.feed(piece, features, [segment], np.array([len(piece) - 1]))
            sound = mx.isfinite(hidden).all()
            self.sequence.length = segment.end
            mx.eval(sound, self.kv_cache.state())
            if not sound.item():
                raise ModelFault(NO_NUMBERS)

    @staticmethod
    def forward(texts: Sequence[PairKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`. All texts share forwards: one for each consecutive token without a feature.

        Each forward writes the columns after those of the forward before; at the end columns get the tokens' order.
        """
        head, kv_cache = texts[0]._head, texts[0].kv_cache
        depths = [text._depths(rows) for text, rows in zip(texts, new, strict=True)]
        orders = [np.argsort(own, kind="stable").astype(np.int32) for own in depths]
        found, fed = list[mx.array](), list[tuple[int, int]]()
        for depth in range(1 + max(int(own.max()) for own in depths)):
            parts = [(n, np.flatnonzero(own == depth).astype(np.int32)) for n, own in enumerate(depths)]
            parts = [(n, rows) for n, rows in parts if len(rows)]
            segments = [_nodes(texts[n].sequence.row, new[n], orders[n], rows) for n, rows in parts]
            tokens = [_picked_tokens(new[n], rows) for n, rows in parts]
            own = [(n, row) for n, rows in parts for row in rows.tolist()]
            features = picked([texts[n]._feature(new[n], row) for n, row in own], texts[0]._dtype)
            joined = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
            hidden, logits = kv_cache.feed(joined, features, segments)
            if not isinstance(head, MaskedHead):
                onward = head.onward(hidden)
                for index, (n, row) in enumerate(own):
                    texts[n]._stand_ins[row + new[n].start] = onward, index
            found.append(logits)
            fed += own
        for text, rows, order in zip(texts, new, orders, strict=True):
            text.sequence.keep(rows.start, rows.start + np.argsort(order).astype(np.int32))
        back = sorted(range(len(fed)), key=fed.__getitem__)
        return found[0] if len(found) == 1 else mx.take(mx.concatenate(found), mx.array(back), axis=0)

    def _depths(self, new: NewRows) -> Ints:
        """Returns the number of forwards that each token waits for, until the one before it has a stand-in."""
        depths: list[int] = []
        for parent, place in zip(new.parents, new.positions[new.start :].tolist(), strict=True):
            known = parent < new.start or self._missing is not None or self.origin + place - 1 in self.features
            depths.append(0 if known else depths[parent - new.start] + 1)
        return np.array(depths, np.int32)

    def _feature(self, new: NewRows, row: int) -> Row:
        """Returns the feature for a new token."""
        column = row + new.start
        before = self.origin + int(new.positions[column]) - 1
        if before in self.features:
            self._guessed.pop(column, None)
            return self.features.row(before)
        self._guessed[column] = before
        return self._missing or self._stand_ins[new.parents[row]]

    def keep(self, prefix: int, columns: Ints) -> None:
        self.sequence.keep(prefix, columns)
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._stand_ins = {kept[old]: row for old, row in self._stand_ins.items() if old in kept}
        self._guessed = {kept[old]: place for old, place in self._guessed.items() if old in kept}


def _nodes(row: int, new: NewRows, order: Ints, rows: Ints) -> NodeSegment:
    """Returns the segment of these rows of the new tokens, whose columns follow one another in this order."""
    first = int(np.flatnonzero(order == rows[0])[0])
    columns = np.concatenate([np.arange(new.start), new.start + order])[: new.start + first + len(rows)]
    seen = new.seen[rows][:, columns]
    return NodeSegment(row, new.start + first, len(rows), places=new.positions[columns], visible=seen)


def _picked_tokens(new: NewRows, rows: Ints) -> mx.array:
    tokens = new.lazy_tokens()
    return tokens if len(rows) == tokens.shape[0] else mx.take(tokens, mx.array(rows), axis=0)


def picked(rows: Sequence[Row], dtype: mx.Dtype) -> mx.array:
    """Returns the rows as one array [T, W]; consecutive rows of one array are taken from it together."""
    parts = []
    for _, group in groupby(rows, key=lambda row: id(row[0])):
        own = list(group)
        array, indices = own[0][0], [index for _, index in own]
        if not isinstance(array, mx.array):
            parts.append(mx.array(array[indices]).astype(dtype))
            continue
        whole = indices == list(range(array.shape[0]))
        parts.append(array if whole else mx.take(array, mx.array(indices), axis=0))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@dataclass(frozen=True, slots=True)
class NewBlocks(NewRows):
    """New tokens, and the block that each opens; None: the next token has a slot in the block of the token before."""

    opened: Sequence[OpenedBlock | None] = ()


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """The slot that predicts the token after `position`: row `row` of a forward's result. `left`: slots after it."""

    logits: mx.array
    hidden: mx.array
    row: int
    left: int
    anchor: int
    position: int

    @property
    def next(self) -> BlockSlot:
        return replace(self, row=self.row + 1, left=self.left - 1, position=self.position + 1)


class BlockKVRows(HeadKVRows):
    """`engine.kv_rows.KVRows` of one text; a column is the slot of a token that was fed."""

    lazy = True
    kv_cache: FeatureKVCache

    def __init__(self, kv_cache: FeatureKVCache) -> None:
        super().__init__(kv_cache)
        self._depth = kv_cache.head.depth
        self.places: Ints = np.zeros(0, np.int32)  # of the features that have been read
        self.end = 0  # the first position whose feature has not arrived
        self._waiting: list[tuple[int, mx.array]] = []
        self._slots: dict[int, BlockSlot] = {}

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features of committed tokens from `position` on, without known ones. Reads and evaluates them if
        there are many."""
        known = max(self.end - position, 0)
        if known >= len(rows):
            return
        self._waiting.append((position + known, mx.array(rows[known:]).astype(self._dtype)))
        self.end = position + len(rows)
        if sum(part.shape[0] for _, part in self._waiting) >= PIECE:
            _read([self])
            mx.eval(self.kv_cache.state())

    def anchor(self, position: int) -> int:
        """Returns where a block begins whose last known token is at `position`.

        That is the first token without a feature, or later if the block would have no slot left.
        """
        return max(min(self.end, position), position - self._depth + 1)

    def reach(self, position: int) -> int:
        """Returns the most tokens that such a block drafts."""
        return self._depth - max(position - self.end, 0)

    def goes_on(self, column: int) -> bool:
        """Whether the block of this column's token has a slot after its own choice."""
        return self._slots[column].left > 0

    def is_stale(self, column: int) -> bool:
        """Whether features have arrived for tokens that its block read without them."""
        slot = self._slots[column]
        return slot.anchor < min(self.end, slot.position)

    def is_sound(self, column: int) -> bool:
        """Whether its block's vectors are finite. Waits."""
        return bool(mx.isfinite(self._slots[column].hidden).all().item())

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        """Does nothing: only features are read."""

    @staticmethod
    def forward(texts: Sequence[BlockKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`: reads the features that have arrived, then opens all blocks."""
        head = texts[0].kv_cache.head
        pairs = [(text, rows) for text, rows in zip(texts, new, strict=True) if isinstance(rows, NewBlocks)]
        _read(texts)
        opened = [(t, c, block) for t, rows in pairs for c, block in enumerate(rows.opened, rows.start) if block]
        if opened:
            by_text = groupby(opened, key=lambda one: one[0])
            blocks = [(text.sequence.row, text.places, [block for *_, block in group]) for text, group in by_text]
            hidden, logits = texts[0].kv_cache.open_blocks(blocks)
            row = 0
            for text, column, own in opened:
                last = own.anchor + len(own.tokens) - 1
                text._slots[column] = BlockSlot(logits, hidden, row, own.slots - 1, own.anchor, last)
                row += own.slots
        slots = []
        for text, rows in pairs:
            for column, parent, block in zip(range(rows.start, rows.end), rows.parents, rows.opened, strict=True):
                if block is None:
                    text._slots[column] = text._slots[parent].next
                slots.append(text._slots[column])
        logits = picked([(slot.logits, slot.row) for slot in slots], mx.float32)
        if head.link is None:
            return logits
        before = mx.concatenate([rows.lazy_tokens() for rows in new])
        return head.link.over(logits, before, picked([(slot.hidden, slot.row) for slot in slots], texts[0]._dtype))

    def keep(self, prefix: int, columns: Ints) -> None:
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._slots = {kept[old]: slot for old, slot in self._slots.items() if old in kept}


def _read(texts: Sequence[BlockKVRows]) -> None:
    """Reads the waiting features of all texts in one forward. Lazy."""
    segments, features = [], []
    for text in texts:
        if text._waiting:
            own = np.concatenate([at + np.arange(rows.shape[0]) for at, rows in text._waiting]).astype(np.int32)
            row, start, unseen = text.sequence.row, len(text.places), np.zeros((len(own), 0), np.bool_)
            text.places = np.concatenate([text.places, own])
            segments.append(NodeSegment(row, start, len(own), places=text.places, visible=unseen))
            features += [rows for _, rows in text._waiting]
            text._waiting, text.sequence.length = [], len(text.places)
    if segments:
        texts[0].kv_cache.read_features(mx.concatenate(features), segments)
