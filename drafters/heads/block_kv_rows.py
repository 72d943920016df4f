"""The KV rows of a block head's tree: slots of blocks in place of columns of tokens.

A block follows the features of all tokens before its first token, its *anchor*. It consists of the known tokens from
the anchor on, then masks; each mask's slot (or that of the token before it) drafts the token there. A token given by
the caller opens a block, which also has slots for the next tokens, so that continuing with the block's own choice needs
no forward. All blocks that are opened together, of all texts, share a forward. Features keep their positions, so
missing ones only leave a gap. Knows rows and blocks; nothing of nodes or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.heads.head import BlockHead
from outrider.drafters.heads.kv_rows import picked
from outrider.engine.flat import Bools, Ints, WindowMask
from outrider.engine.kv_rows import JointKVRowCache, KVRowCache, NewRows, TreeAttentionMetadata
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix

PIECE = 512


@dataclass(frozen=True, slots=True)
class OpenedBlock:
    """A block to open: its first position, the known tokens from there on, and its number of slots."""

    anchor: int
    tokens: Sequence[int]
    slots: int


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


class BlockKVRows:
    """`engine.kv_rows.KVRows` of one text; a column is the slot of a token that was fed."""

    lazy = True
    whole = False

    def __init__(self, head: BlockHead) -> None:
        self._head = head
        self._dtype = next(value.dtype for _, value in tree_flatten(head.parameters()))  # type: ignore[attr-defined]
        self.frame = TreeAttentionMetadata()
        self.layers = [KVRowCache(self.frame) for _ in make_prompt_cache(head)]
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
            _read(self._head, [self])
            mx.eval([layer.state for layer in self.layers])

    def anchor(self, position: int) -> int:
        """Returns where a block begins whose last known token is at `position`.

        That is the first token without a feature, or later if the block would have no slot left.
        """
        return max(min(self.end, position), position - self._head.depth + 1)

    def reach(self, position: int) -> int:
        """Returns the most tokens that such a block drafts."""
        return self._head.depth - max(position - self.end, 0)

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
        head = texts[0]._head
        pairs = [(text, rows) for text, rows in zip(texts, new, strict=True) if isinstance(rows, NewBlocks)]
        _read(head, texts)
        _open(head, [segment for text, rows in pairs if (segment := BlockSegment.of(text, rows)).blocks])
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

    def save(self, count: int) -> SavedPrefix:
        """Returns an empty prefix: nothing is kept for other texts."""
        return SavedPrefix(0, ())

    def restore(self, start: CachedPrefix) -> None:
        """Does nothing: no prefix is kept."""


@dataclass(frozen=True, slots=True)
class BlockSegment:
    """A text's blocks in one forward, and the columns that open them."""

    text: BlockKVRows
    columns: Sequence[int]
    blocks: Sequence[OpenedBlock]
    masks: dict[int | None, mx.array | None] = field(default_factory=dict)

    @classmethod
    def of(cls, text: BlockKVRows, new: NewBlocks) -> BlockSegment:
        opened = [(column, block) for column, block in enumerate(new.opened, new.start) if block is not None]
        return cls(text, [column for column, _ in opened], [block for _, block in opened])

    def lengths(self, masks_more: int) -> Ints:
        """Returns the number of rows of each block, with `masks_more` more masks than slots after its known tokens."""
        return np.array([len(block.tokens) + block.slots - 1 + masks_more for block in self.blocks], np.int32)

    def mask(self, lengths: Ints, window: int | None) -> mx.array | None:
        """Returns what each row sees: the features before its block's anchor, and its block; None: everything."""
        if window not in self.masks:
            anchors = np.array([block.anchor for block in self.blocks], np.int32)
            number, own = np.arange(len(lengths)).repeat(lengths), _places(lengths) + anchors.repeat(lengths)
            context = self.text.places[: self.context]
            seen: Bools = np.concatenate(
                [context < anchors.repeat(lengths)[:, None], number[:, None] == number], axis=1
            )
            if window is not None:
                seen &= np.concatenate([context, own]) > own[:, None] - window
            self.masks[window] = None if seen.all() else mx.array(seen)
        return self.masks[window]

    @property
    def context(self) -> int:
        """The number of features that the farthest block sees."""
        return int(np.searchsorted(self.text.places, max(block.anchor for block in self.blocks)))


class BlockCache:
    """The cache of one layer for a forward of blocks, whose own keys and values are not kept."""

    def __init__(self, parts: Sequence[BlockSegment], lengths: Sequence[Ints], number: int, offset: mx.array) -> None:
        self._parts, self._lengths, self._number, self.offset = parts, lengths, number, offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: Any) -> mx.array:
        """Returns the attention of all blocks' queries [1, H, T, D], computed text by text."""
        outputs, begin = [], 0
        for part, lengths in zip(self._parts, self._lengths, strict=True):
            own = slice(begin, begin := begin + int(lengths.sum()))
            keys, values, mask = self._keys[:, :, own], self._values[:, :, own], part.mask(lengths, window)
            if count := part.context:
                context_keys, context_values = part.text.layers[self._number].state
                keys = mx.concatenate([context_keys[..., :count, :], keys], axis=2)
                values = mx.concatenate([context_values[..., :count, :], values], axis=2)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    queries[:, :, own], keys, values, scale=scale, mask=mask, sinks=sinks
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _read(head: BlockHead, texts: Sequence[BlockKVRows]) -> None:
    """Reads the waiting features of all texts in one forward. Lazy."""
    reading = [text for text in texts if text._waiting]
    if not reading:
        return
    places = [np.concatenate([at + np.arange(rows.shape[0]) for at, rows in text._waiting]) for text in reading]
    features = mx.concatenate([rows for text in reading for _, rows in text._waiting])
    offset = mx.array(np.concatenate(places).astype(np.int32))
    ends = np.cumsum([len(own) for own in places]).tolist()
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    for text, own in zip(reading, places, strict=True):
        text.frame.plain(len(text.places), len(own))
    caches: list[Any] = [
        JointKVRowCache(layers, spans, offset) for layers in zip(*(t.layers for t in reading), strict=True)
    ]
    head.read(features[None], caches)
    for text, own in zip(reading, places, strict=True):
        text.places, text._waiting = np.concatenate([text.places, own.astype(np.int32)]), []


def _open(head: BlockHead, parts: Sequence[BlockSegment]) -> None:
    """Computes these blocks; the first slot of each becomes that of the column that opens it. Lazy."""
    if not parts:
        return
    masks_more = 0 if head.from_anchor else 1
    lengths = [part.lengths(masks_more) for part in parts]
    blocks = [block for part in parts for block in part.blocks]
    rows = np.concatenate(lengths)
    ids = [
        token
        for block, count in zip(blocks, rows.tolist(), strict=True)
        for token in (*block.tokens, *[head.mask_token] * (count - len(block.tokens)))
    ]
    places = _places(rows)
    offset = mx.array(places + np.array([block.anchor for block in blocks], np.int32).repeat(rows))
    caches: list[Any] = [BlockCache(parts, lengths, number, offset) for number in range(len(parts[0].text.layers))]
    hidden = head.block(mx.array(ids, mx.int32)[None], mx.array(places), caches)[0]
    known = np.array([len(block.tokens) for block in blocks], np.int32) - 1 + masks_more
    hidden = mx.take(hidden, mx.array(np.flatnonzero(places >= known.repeat(rows)).astype(np.int32)), axis=0)
    logits, row = head.logits(hidden), 0
    for part in parts:
        for column, block in zip(part.columns, part.blocks, strict=True):
            last = block.anchor + len(block.tokens) - 1
            part.text._slots[column] = BlockSlot(logits, hidden, row, block.slots - 1, block.anchor, last)
            row += block.slots


def _places(lengths: Ints) -> Ints:
    """Returns 0, 1, ... for each block of these lengths, concatenated."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = (np.arange(lengths.sum()) - starts.repeat(lengths)).astype(np.int32)
    return places
