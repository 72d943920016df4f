"""The KV rows of a block head's tree: slots of blocks in place of columns of tokens.

A block stands behind the features of all tokens before its first one, its *anchor*. The known tokens from there on come
first in it, then masks; each mask's slot (or that of the token before it) drafts the token there. A token given by the
caller opens a block, which also has slots for what follows, so that continuing with the block's own choice needs no
forward. All blocks that are opened at once, of all texts, are one forward. Features keep their positions, so missed
rows only leave a gap. Knows rows and blocks; nothing of nodes or sampling.
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
    """One to be opened: its first position, the tokens known from there on, and how many slots it is to have."""

    anchor: int
    tokens: Sequence[int]
    slots: int


@dataclass(frozen=True, slots=True)
class NewBlocks(NewRows):
    """`opened`: the block of each token; None: what follows it has a slot in that of the token before."""

    opened: Sequence[OpenedBlock | None] = ()


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """Says what follows the token at `position`: row `row` of what a forward made. `left`: slots behind it."""

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
    """`engine.kv_rows.KVRows` of one text; a column is a token that was fed, as its slot."""

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
        """The target's rows of committed tokens, the first at `position`; known ones are skipped. Many are read at
        once, and evaluated."""
        known = max(self.end - position, 0)
        if known >= len(rows):
            return
        self._waiting.append((position + known, mx.array(rows[known:]).astype(self._dtype)))
        self.end = position + len(rows)
        if sum(part.shape[0] for _, part in self._waiting) >= PIECE:
            _read(self._head, [self])
            mx.eval([layer.state for layer in self.layers])

    def anchor(self, position: int) -> int:
        """Where a block begins in which the token at `position` is known, and what follows it is not.

        At the first token without a feature; no farther back than leaves a slot.
        """
        return max(min(self.end, position), position - self._head.depth + 1)

    def reach(self, position: int) -> int:
        """How many tokens such a block drafts at most."""
        return self._head.depth - max(position - self.end, 0)

    def goes_on(self, column: int) -> bool:
        """Whether the block of this column's token has a slot behind its own choice."""
        return self._slots[column].left > 0

    def is_stale(self, column: int) -> bool:
        """Whether features have arrived since for tokens that its block had to read without them."""
        slot = self._slots[column]
        return slot.anchor < min(self.end, slot.position)

    def is_sound(self, column: int) -> bool:
        """Whether its block's vectors are numbers. Waits."""
        return bool(mx.isfinite(self._slots[column].hidden).all().item())

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        """Nothing: features alone are read."""

    @staticmethod
    def forward(texts: Sequence[BlockKVRows], new: Sequence[NewRows]) -> mx.array:
        """See `KVRows.forward`: features that arrived are read, then all blocks are opened."""
        head = texts[0]._head
        asked = [(text, one) for text, one in zip(texts, new, strict=True) if isinstance(one, NewBlocks)]
        _read(head, texts)
        _open(head, [part for text, one in asked if (part := BlockSegment.of(text, one)).blocks])
        slots = []
        for text, one in asked:
            for column, parent, block in zip(range(one.start, one.end), one.parents, one.opened, strict=True):
                if block is None:
                    text._slots[column] = text._slots[parent].next
                slots.append(text._slots[column])
        logits = picked([(slot.logits, slot.row) for slot in slots], mx.float32)
        if head.link is None:
            return logits
        before = mx.concatenate([one.lazy_tokens() for one in new])
        return head.link.over(logits, before, picked([(slot.hidden, slot.row) for slot in slots], texts[0]._dtype))

    def keep(self, prefix: int, columns: Ints) -> None:
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._slots = {kept[old]: slot for old, slot in self._slots.items() if old in kept}

    def save(self, count: int) -> SavedPrefix:
        """Nothing is kept for other texts."""
        return SavedPrefix(0, ())

    def restore(self, start: CachedPrefix) -> None:
        """Nothing was kept."""


@dataclass(frozen=True, slots=True)
class BlockSegment:
    """A text's blocks in one forward, and the columns that open them. `begin`: the place of the first row there."""

    text: BlockKVRows
    columns: Sequence[int]
    blocks: Sequence[OpenedBlock]
    masks: dict[int | None, mx.array | None] = field(default_factory=dict)

    @classmethod
    def of(cls, text: BlockKVRows, new: NewBlocks) -> BlockSegment:
        opened = [(column, block) for column, block in enumerate(new.opened, new.start) if block is not None]
        return cls(text, [column for column, _ in opened], [block for _, block in opened])

    def lengths(self, masks_more: int) -> Ints:
        """The number of rows of each block, with `masks_more` more masks than slots behind its last known token."""
        return np.array([len(block.tokens) + block.slots - 1 + masks_more for block in self.blocks], np.int32)

    def mask(self, lengths: Ints, window: int | None) -> mx.array | None:
        """What each row sees: the features before its block's anchor, and its block; None: everything."""
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
        """How many features the farthest block sees."""
        return int(np.searchsorted(self.text.places, max(block.anchor for block in self.blocks)))


class BlockCache:
    """One layer while blocks are open: their own keys and values go with the forward."""

    def __init__(self, parts: Sequence[BlockSegment], lengths: Sequence[Ints], number: int, offset: mx.array) -> None:
        self._parts, self._lengths, self._number, self.offset = parts, lengths, number, offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: Any) -> mx.array:
        """The attention of all blocks' queries [1, H, T, D], a text at a time."""
        found, begin = [], 0
        for part, lengths in zip(self._parts, self._lengths, strict=True):
            own = slice(begin, begin := begin + int(lengths.sum()))
            keys, values, mask = self._keys[:, :, own], self._values[:, :, own], part.mask(lengths, window)
            if known := part.context:
                before, more = part.text.layers[self._number].state
                keys = mx.concatenate([before[..., :known, :], keys], axis=2)
                values = mx.concatenate([more[..., :known, :], values], axis=2)
            found.append(
                mx.fast.scaled_dot_product_attention(
                    queries[:, :, own], keys, values, scale=scale, mask=mask, sinks=sinks
                )
            )
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)


def _read(head: BlockHead, texts: Sequence[BlockKVRows]) -> None:
    """Remembers the features that wait, of all texts in one forward. Lazy."""
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
    """Makes these blocks, and the first slot of each that of the column that opened it. Lazy."""
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
    """0, 1, .. in each of rows of these lengths, one behind the other."""
    starts = np.cumsum(lengths) - lengths
    places: Ints = (np.arange(lengths.sum()) - starts.repeat(lengths)).astype(np.int32)
    return places
