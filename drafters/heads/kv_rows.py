"""The KV rows of a head's tree: columns of pairs in place of a model's columns of tokens, by MLX or by numpy.

A pair is a token and the feature of the token before it: the target's, if that has arrived, or else a stand-in. A
masked head has learned one stand-in for any feature; for other heads it is the head's vector of the pair before, so
consecutive tokens without features are fed one a forward. Knows columns and rows; nothing of nodes or sampling.

`FeatureBuffer` holds features that have arrived and are not fed yet, of consecutive committed tokens. Only the newest
of many are kept. `HostKVRows` computes tree nodes and short pieces of text by numpy, over the same buffers, and leaves
long pieces to MLX. It is not lazy: a forward returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.heads.head import NO_NUMBERS, GuessingHead, MaskedHead
from outrider.drafters.heads.pair_kv_cache import NumpyHead
from outrider.engine.cache import window_of, with_room
from outrider.engine.flat import Bools, Floats, Ints, WindowMask, install
from outrider.engine.kv_rows import KVRowCache, NewRows, TreeAttentionMetadata, gather, restore, saved
from outrider.engine.numpy_net import MOST_ROWS, NumpySegment, hidden
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import ModelFault

MOST = 2048

Row = tuple[mx.array | Floats, int]
"""An array [N, W] and the index of one of its rows."""


class FeatureBuffer:
    """The features of the positions `begin`..`end`-1."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[tuple[int, Floats]] = []

    def add(self, position: int, rows: Floats) -> None:
        """Adds rows from `position` on. Known ones are skipped; after a gap only the new ones are kept."""
        end = position + rows.shape[0]
        if end <= self.end:
            return
        if not self.begin <= position <= self.end:
            self.begin, self._parts = position, []
        elif position < self.end:
            position, rows = self.end, rows[self.end - position :]
        self._parts.append((position, rows))
        self.end = end
        self.forget(end - MOST)

    def forget(self, position: int) -> None:
        """Drops the rows before this position."""
        if position > self.begin:
            self.begin = min(position, self.end)
            self._parts = [part for part in self._parts if part[0] + part[1].shape[0] > position]

    def __contains__(self, position: int) -> bool:
        return self.begin <= position < self.end

    def row(self, position: int) -> Row:
        """Returns the row of a position that the buffer has."""
        first, rows = next(part for part in self._parts if part[0] <= position < part[0] + part[1].shape[0])
        return rows, position - first

    def between(self, begin: int, end: int) -> Floats:
        """Returns the rows [end - begin, W] of these positions, all of which the buffer has."""
        parts = [
            rows[max(begin - first, 0) : max(end - first, 0)]
            for first, rows in self._parts
            if first < end and begin < first + rows.shape[0]
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


PIECE = 512


class PairKVRows:
    """`engine.kv_rows.KVRows` of one text. The token of column 0 is at position `origin`."""

    lazy = True
    whole = False

    def __init__(self, head: GuessingHead) -> None:
        install(head)
        self._head = head
        self._missing: Row | None = (head.mask_feature, 0) if isinstance(head, MaskedHead) else None
        self._dtype: mx.Dtype = next(value.dtype for _, value in tree_flatten(head.parameters()))  # type: ignore[union-attr]
        self._frame = TreeAttentionMetadata()
        self.features = FeatureBuffer()
        self.begin_at(0)

    def begin_at(self, origin: int) -> None:
        """Drops everything; the text is read from this position on."""
        self.origin = origin
        self.leaves = [KVRowCache(self._frame, window_of(cache)) for cache in make_prompt_cache(self._head)]
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
            piece = mx.array(list(tokens[begin : begin + PIECE]), mx.int32)
            before = self.origin + begin - 1
            self._frame.plain(begin, piece.shape[0])
            features = mx.array(self.features.between(before, before + piece.shape[0])).astype(self._dtype)
            hidden = self._head(piece[None], features[None], self.leaves)  # type: ignore[arg-type]
            sound = mx.isfinite(hidden).all()
            mx.eval(sound, [leaf.state for leaf in self.leaves])
            if not sound.item():
                raise ModelFault(NO_NUMBERS)

    @staticmethod
    def forward(texts: Sequence[PairKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`. All texts share forwards: one for each consecutive token without a feature."""
        depths = [text._depths(rows) for text, rows in zip(texts, new, strict=True)]
        vectors: list[Any] = []
        order: list[tuple[int, int]] = []
        for depth in range(1 + max(int(own.max()) for own in depths)):
            parts: list[PairSegment] = []
            for number, (text, new_rows, own) in enumerate(zip(texts, new, depths, strict=True)):
                rows: Ints = np.flatnonzero(own == depth).astype(np.int32)
                if len(rows):
                    begin = parts[-1].span.stop if parts else 0
                    parts.append(PairSegment(text, new_rows, rows, begin))
                    order += [(number, int(row)) for row in rows]
            vectors.append(texts[0].hidden(parts))
        return texts[0].logits(vectors, sorted(range(len(order)), key=order.__getitem__))

    def hidden(self, parts: Sequence[PairSegment]) -> Any:
        """Returns the hidden vectors [T, H] of these pairs; a `StepHead`'s become stand-ins for the next features."""
        tokens = [part.tokens for part in parts]
        features = picked([row for part in parts for row in part.features()], self._dtype)
        offset = mx.array(np.concatenate([part.places for part in parts]))
        caches: list[Any] = [PairRowCache(parts, number, offset) for number in range(len(self.leaves))]
        flat = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
        hidden = self._head(flat[None], features[None], caches)[0]
        if not isinstance(self._head, MaskedHead):
            set_stand_ins(parts, self._head.onward(hidden))
        return hidden

    def logits(self, vectors: Sequence[Any], back: Sequence[int]) -> mx.array:
        """Returns the logits [R, V] of the concatenated vectors of several forwards, at these indices."""
        hidden = vectors[0] if len(vectors) == 1 else mx.concatenate(list(vectors))
        in_order = list(back) == list(range(len(back)))
        return self._head.logits(hidden if in_order else mx.take(hidden, mx.array(list(back)), axis=0))

    def _depths(self, new: NewRows) -> Ints:
        """Returns the number of forwards that each token waits for, until the one before it has a stand-in."""
        depths: list[int] = []
        for parent, place in zip(new.parents, new.positions[new.start :].tolist(), strict=True):
            known = parent < new.start or self._missing is not None or self.origin + place - 1 in self.features
            depths.append(0 if known else depths[parent - new.start] + 1)
        return np.array(depths, np.int32)

    def feature(self, column: int, parent: int, position: int) -> Row:
        """Returns the feature for the token of a column, at `position`, after the token of column `parent`."""
        before = position - 1
        if before in self.features:
            self._guessed.pop(column, None)
            return self.features.row(before)
        self._guessed[column] = before
        return self._missing or self._stand_ins[parent]

    def set_stand_in(self, column: int, row: Row) -> None:
        """Sets the stand-in for the feature of this column's token."""
        self._stand_ins[column] = row

    def keep(self, prefix: int, columns: Ints) -> None:
        gather(self.leaves, prefix, columns)
        self.renumber(prefix, columns)

    def renumber(self, prefix: int, columns: Ints) -> None:
        """Moves the state of columns along with them."""
        kept = {old: prefix + index for index, old in enumerate(columns.tolist())}
        self._stand_ins = {kept[old]: row for old, row in self._stand_ins.items() if old in kept}
        self._guessed = {kept[old]: place for old, place in self._guessed.items() if old in kept}

    def save(self, count: int) -> SavedPrefix:
        return saved(self.leaves, count)

    def restore(self, start: CachedPrefix) -> None:
        restore(self._frame, self.leaves, start)


@dataclass(frozen=True, slots=True)
class PairSegment:
    """The tokens of one text in one forward: `rows` of its new tokens, from index `begin` of the forward on."""

    text: PairKVRows
    new: NewRows
    rows: Ints
    begin: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + len(self.rows))

    @property
    def tokens(self) -> mx.array:
        tokens = self.new.lazy_tokens()
        return tokens if len(self.rows) == tokens.shape[0] else mx.take(tokens, mx.array(self.rows))

    @property
    def columns(self) -> Ints:
        columns: Ints = self.rows + np.int32(self.new.start)
        return columns

    @property
    def place(self) -> slice | Ints:
        """The columns as an index of a buffer."""
        columns = self.columns
        contiguous = columns[-1] - columns[0] + 1 == len(columns)
        return slice(int(columns[0]), int(columns[-1]) + 1) if contiguous else columns

    @property
    def places(self) -> Ints:
        return self.new.positions[self.columns]

    def features(self) -> list[Row]:
        text = self.text
        parents = [self.new.parents[row] for row in self.rows]
        triples = zip(self.columns.tolist(), parents, (self.places + text.origin).tolist(), strict=True)
        return [text.feature(column, parent, place) for column, parent, place in triples]

    def mask(self, window: int | None) -> mx.array | None:
        """Returns the columns that each token sees [rows, end]; None: all of them."""
        seen: Bools = self.new.seen[self.rows]
        if window is not None:
            seen = seen & (self.places[:, None] - self.new.positions < window)
        return None if seen.all() else mx.array(seen)


class PairRowCache:
    """The cache of one layer for a forward, over the columns of its texts."""

    def __init__(self, parts: Sequence[PairSegment], number: int, offset: mx.array) -> None:
        self._parts = [(part, part.text.leaves[number]) for part in parts]
        self.offset = offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size or self._parts[0][1].window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes each text's own; the result is not used."""
        for part, leaf in self._parts:
            end = part.new.end
            place = part.place if isinstance(part.place, slice) else mx.array(part.place)
            leaf.keys, leaf.values = with_room(leaf.keys, 1, end, keys), with_room(leaf.values, 1, end, values)
            leaf.keys[..., place, :] = keys[:, :, part.span]
            leaf.values[..., place, :] = values[:, :, part.span]
        return keys, values

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: Any) -> mx.array:
        """Returns the attention of flat queries [1, H, T, D], each over its own text."""
        outputs = []
        for part, leaf in self._parts:
            keys, values = (b[..., : part.new.end, :] for b in (leaf.keys, leaf.values))  # type: ignore[index]
            own, mask = queries[:, :, part.span], part.mask(window)
            outputs.append(mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=mask, sinks=sinks))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def set_stand_ins(parts: Sequence[PairSegment], onward: mx.array | Floats) -> None:
    """Sets the stand-ins that a forward of these parts computed."""
    for part in parts:
        for index, column in enumerate(part.columns.tolist(), part.begin):
            part.text.set_stand_in(column, (onward, index))


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


class HostKVRows(PairKVRows):
    """`PairKVRows` by numpy, for a head in float32 on a CPU."""

    lazy = False

    def __init__(self, head: GuessingHead, numpy: NumpyHead) -> None:
        super().__init__(head)
        self._numpy = numpy
        if self._missing is not None:
            self._missing = np.array(self._missing[0]), 0

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        end, before = len(tokens), self.origin + start - 1
        if not 0 < end - start <= MOST_ROWS:
            super().prefill(tokens, progress, total, start)
            return
        positions = np.arange(start, end, dtype=np.int32)
        masked = hidden(positions[:, None] >= np.arange(end))
        spans = (
            [NumpySegment(slice(0, end - start), *own, slice(start, end), end, masked)] for own in self.buffers(end)
        )
        features = self.features.between(before, before + end - start)
        if not np.isfinite(self._numpy.rows(np.array(tokens[start:]), features, positions, spans)).all():
            raise ModelFault(NO_NUMBERS)

    def hidden(self, parts: Sequence[PairSegment]) -> Any:
        tokens = np.concatenate([np.array(part.new.tokens)[part.rows] for part in parts])
        features = np.stack([array[index] for part in parts for array, index in part.features()])
        places, own = np.concatenate([part.places for part in parts]), list(map(_spans, parts))
        vectors = self._numpy.rows(tokens, features, places, zip(*own, strict=True))
        if self._missing is None:
            set_stand_ins(parts, self._numpy.stands_in(vectors))
        return vectors

    def logits(self, vectors: Sequence[Any], back: Sequence[int]) -> mx.array:
        rows = vectors[0] if len(vectors) == 1 else np.concatenate(vectors)[list(back)]
        return mx.array(self._numpy.scores(rows))

    def keep(self, prefix: int, columns: Ints) -> None:
        for buffers in self.buffers(0):
            for buffer in buffers:
                buffer[:, prefix : prefix + len(columns)] = buffer[:, columns]
        self.renumber(prefix, columns)

    def buffers(self, end: int) -> Iterator[tuple[Floats, Floats]]:
        """Yields each layer's keys and values [kv heads, columns, D] without a copy, with room for `end` columns."""
        for leaf, layer in zip(self.leaves, self._numpy.layers, strict=True):
            like = mx.zeros((1, layer.kv_heads, 1, layer.width))
            leaf.keys, leaf.values = with_room(leaf.keys, 1, end, like), with_room(leaf.values, 1, end, like)
            mx.eval(leaf.keys, leaf.values)
            yield np.array(leaf.keys, copy=False)[0], np.array(leaf.values, copy=False)[0]


def _spans(part: PairSegment) -> Iterator[NumpySegment]:
    """Yields the buffers of this part's text for each layer's attention."""
    masked = hidden(part.new.seen[part.rows])
    for keys, values in part.text.buffers(part.new.end):  # type: ignore[attr-defined]
        yield NumpySegment(part.span, keys, values, part.place, part.new.end, masked)
