"""The keys and values of token trees: a row of columns for each tree, the committed prefix first, then the nodes.

All trees of a model share one buffer for each layer (`engine.flat`), and mlx-lm models run unmodified. A node's mask
and its position are those of its `NodeSegment`. Knows columns and positions; knows nothing of nodes or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any
from weakref import finalize

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from outrider.engine.cache import flatten_caches
from outrider.engine.flat import Bools, FlatCache, Floats, Ints, LayerKVs, NodeSegment, Segment
from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS, KVLayout, ModelRows
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import SavedPrefix
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.trees import ROOT, node_depths

log = logging.getLogger(__name__)

_ORT_PREFILL_CHUNK_TOKENS = 128  # as fast per token as 512, and other requests wait less

Array = mx.array | Floats
Row = tuple[Array, int]
"""An array [N, ...] and the index of one of its rows."""

States = tuple[tuple[mx.array, ...], ...]
"""One tuple for each recurrent layer; the first axis of each array is the forward's rows."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Tokens [R] to feed to one tree.

    `start`: the first token's column; the others follow. `positions`: the absolute positions of all columns, [start +
    R]. `seen`: the columns that each token attends to, including its own, [R, start + R]. `parents`: the column of the
    token before each token; `start` or more if it is one of these tokens. `slots`: where each token's logits are, if a
    head drafts in blocks (`drafters.heads`).
    """

    tokens: Sequence[int] | mx.array
    start: int
    positions: Ints
    seen: Bools
    parents: Sequence[int]
    slots: Sequence[Any] = ()

    @property
    def end(self) -> int:
        return len(self.positions)

    def lazy_tokens(self) -> mx.array:
        """Returns the tokens as an MLX array, int32 [R]."""
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array(list(self.tokens), dtype=mx.int32)


class KVRows:
    """A tree's columns, in a form for each kind of model, which `engine.load_checks` chooses. A forward writes the
    columns from `start` on and, if `lazy`, never waits.

    `has_extra_state`: there is state besides the columns, so only all columns can be saved together.
    `max_unused_columns`: so many are not worth a gather. By default the methods do nothing, and `save` returns an empty
    prefix.
    """

    lazy = True
    has_extra_state = False
    max_unused_columns = 8

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        """Feeds a piece of `tokens` as columns from `start` on, evaluated. Returns how many it has fed."""
        return len(tokens)

    @staticmethod
    def forward(texts: Sequence[Any], new: Sequence[NewRows]) -> mx.array:
        """Feeds each of `texts`, rows of this form and one model, its tokens. Lazy.

        Uses one forward if the form can. A forward that fails may have written after every text's columns, nowhere
        else.

        Returns:
            Logits [all R, V], text after text.
        """
        raise NotImplementedError

    def is_stale(self, column: int) -> bool:
        """Returns whether a column's token would be fed with other inputs now."""
        return False

    def keep(self, prefix: int, columns: Ints) -> None:
        """Moves column `columns[i]` (ascending, from `prefix` on) to column `prefix` + i, and drops the others."""

    def save(self, count: int) -> SavedPrefix:
        """Returns a copy of the first `count` columns, evaluated: all of them with `has_extra_state`."""
        return SavedPrefix(0, ())

    def restore(self, start: SavedPrefix) -> None:
        """Fills the first columns, which are empty."""

    def close(self) -> None:
        """Frees the columns."""


class ReadingFault(OutriderError):
    """A reader can't continue; the model reads the rest itself."""


PromptReader = Callable[[Sequence[int]], Iterator[LayerKVs]]
"""Reads prompts instead of a model, by the same weights. Yields keys (rotated) and values of a prompt's first tokens in
pieces. Raises ReadingFault if it fails."""


@cache
def _shared_rows(model: LoadedModel) -> ModelRows:
    """Returns the rows that all trees of this model share."""
    return ModelRows(model.model, model.cpu)


class DenseKVRows(KVRows):
    """`KVRows` of a model with attention layers only, with one tree per forward.

    A `reader` may read prompts instead of the model; `read`: the tokens that it has read so far. If it fails, only time
    is lost: the model continues from there.
    """

    reader: PromptReader | None = None
    read = 0
    _pieces: Iterator[LayerKVs] = iter(())  # those that the reader has still to read

    def __init__(self, model: LoadedModel, rows: ModelRows | None = None) -> None:
        """`rows`: where the columns are; None: the rows that all trees of this model share."""
        self.rows = rows or _shared_rows(model)
        self.lazy = self.rows.is_lazy
        self.sequence = self.rows.open()
        finalize(self, self.rows.drop, self.sequence)

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        if self.reader is not None and start == 0:
            self._pieces = self.reader(tokens)
        try:
            piece = next(self._pieces, None)
        except ReadingFault as error:
            log.warning("%s; the model reads the prompt from token %d on", error, start)
            piece = None
        if piece is None:
            return self._prefill_by_model(tokens, start)
        count = self.adopt(start, piece) - start
        self.read += count
        return count

    def _prefill_by_model(self, tokens: Sequence[int], start: int) -> int:
        count = min(len(tokens), PREFILL_CHUNK_TOKENS if self.lazy else _ORT_PREFILL_CHUNK_TOKENS)
        if count:
            segment = Segment(self.sequence.row, start, count, long=True)
            self.rows.run([tokens[:count]], [segment], logits_indices=())
            self.sequence.length = segment.end
            if self.lazy:
                mx.eval(self.rows.state())
                mx.clear_cache()
        return count

    def adopt(self, start: int, layers: LayerKVs) -> int:
        """Fills the columns from `start` on; returns the first column after them."""
        typed = tuple((keys.astype(self.number_format), values.astype(self.number_format)) for keys, values in layers)
        self.sequence.length = start
        self.rows.extend(self.sequence, typed, typed[0][0].shape[2])
        return self.sequence.length

    @cached_property
    def number_format(self) -> mx.Dtype:
        """The format of the columns, without computing any."""
        return KVLayout.of(self.rows.model, self.rows.cpu).tensors[0].dtype

    @staticmethod
    def forward(texts: Sequence[DenseKVRows], new: Sequence[NewRows]) -> mx.array:
        logits = [text._forward_one(own) for text, own in zip(texts, new, strict=True)]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _forward_one(self, new: NewRows) -> mx.array:
        """Feeds this tree its tokens. Returns their logits [R, V]. Lazy."""
        return self.rows.run([new.tokens], [self._segment(new)])

    def _segment(self, new: NewRows) -> NodeSegment:
        """Returns the segment of these tokens, whose columns are in use from now on."""
        self.sequence.length = new.end
        row, count = self.sequence.row, len(new.parents)
        return NodeSegment(row, new.start, count, all_positions=new.positions, visible=new.seen)

    def keep(self, prefix: int, columns: Ints) -> None:
        self.sequence.keep(prefix, columns)

    def save(self, count: int) -> SavedPrefix:
        return self.rows.save(self.sequence, count)

    def restore(self, start: SavedPrefix) -> None:
        self.rows.adopt(self.sequence, start)

    def close(self) -> None:
        self.rows.close(self.sequence)


class JointKVRows(DenseKVRows):
    """`KVRows` of a model with mlx-lm's common attention: all trees in one forward, like the target's texts."""

    @staticmethod
    def forward(texts: Sequence[DenseKVRows], new: Sequence[NewRows]) -> mx.array:
        segments = [text._segment(own) for text, own in zip(texts, new, strict=True)]
        return texts[0].rows.run([own.tokens for own in new], segments)


class _BatchCache(FlatCache):
    """A row of columns that all rows of a batch, of one token each, write and read."""

    def make_mask(self, *args: Any, **others: Any) -> Any:
        mask = super().make_mask(*args, **others)
        batched = isinstance(self._frame.only_segment, NodeSegment) and mask is not None
        return mask[:, None, None] if batched else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = keys.shape[0]
        if rows == 1:
            return super().update_and_fetch(keys, values)
        keys, values = super().update_and_fetch(keys.swapaxes(0, 2), values.swapaxes(0, 2))
        return mx.broadcast_to(keys, (rows, *keys.shape[1:])), mx.broadcast_to(values, (rows, *values.shape[1:]))


class _BatchRows(ModelRows):
    """One tree, whose tokens are the rows of a batch. Recurrent layers keep the model's own caches."""

    _cache_type = _BatchCache

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelError if the model has a kind of cache that can be neither masked nor kept by reference."""
        super().__init__(model.model)
        leaves = [leaf for cache in self._caches for leaf in flatten_caches(cache)]
        self.recurrent = [leaf for leaf in leaves if isinstance(leaf, ArraysCache)]
        for leaf in leaves:
            if type(leaf) not in (_BatchCache, ArraysCache):
                raise ModelError(
                    f"{model.model_type} keeps a {type(leaf).__name__}, which can't be copied for branches"
                )

    def batch(self, tokens: mx.array, row: int, start: int, positions: Ints, seen: Bools) -> mx.array:
        """Feeds tokens [R], each as a row of a batch. Returns their logits [R, V]. Lazy."""
        self._frame.begin([NodeSegment(row, start, tokens.shape[0], all_positions=positions, visible=seen)])
        logits: mx.array = self.model(tokens[:, None], cache=self._caches)
        return logits[:, 0]


class RecurrentKVRows(DenseKVRows):
    """`KVRows` of a model with recurrent layers, alone or with attention. Each tree puts its own state into the caches.

    A recurrent state can't be masked, so a forward over R tokens is a batch of R rows of one token, each with its
    parent's state; every column keeps the state after it, by reference. Attention layers have one shared row of
    columns, which all rows of the batch read.
    """

    has_extra_state = True
    max_unused_columns = -1  # each has a state, which a gather frees, also of committed tokens
    rows: _BatchRows

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelError if the model has a kind of cache that can be neither masked nor kept by reference."""
        super().__init__(model, _BatchRows(model))  # its own, because a forward puts its tree's state into the caches
        self._column_states: dict[int, tuple[States, int]] = {}  # after each: the states of a forward, and its row

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        if not tokens:
            return 0
        self._put_states([start - 1])
        count = super().prefill(tokens, start)
        self._column_states = {start + count - 1: (self._states(), 0)}
        return count

    def _forward_one(self, new: NewRows) -> mx.array:
        tokens, start, positions, seen, parents = new.lazy_tokens(), new.start, new.positions, new.seen, new.parents
        logits: list[mx.array] = []
        order: list[int] = []
        # The rows of a forward must write adjacent columns.
        for rows in _group_by_depth(start, parents):
            first, last = rows[0], start + rows[-1]
            self._put_states([parents[row] for row in rows])
            own = positions[: last + 1], seen[rows, : last + 1]
            logits.append(self.rows.batch(tokens[first : rows[-1] + 1], self.sequence.row, start + first, *own))
            states = self._states()
            self._column_states.update({start + row: (states, i) for i, row in enumerate(rows)})
            order += rows
        if len(logits) == 1:
            return logits[0]
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.concatenate(logits)[mx.array(back)]

    def keep(self, prefix: int, columns: Ints) -> None:
        super().keep(prefix, columns)
        kept = [(prefix - 1, prefix - 1), *enumerate(columns.tolist(), prefix)]
        self._column_states = {new: self._column_states[old] for new, old in kept if old in self._column_states}

    def save(self, count: int) -> SavedPrefix:
        forward, row = self._column_states[count - 1]
        states = tuple(tuple(a[row : row + 1] for a in own) for own in forward)
        mx.eval(states)
        return replace(super().save(count), states=states)

    def restore(self, start: SavedPrefix) -> None:
        super().restore(start)
        self._column_states = {start.length - 1: (start.states, 0)}

    def _states(self) -> States:
        return tuple(tuple(cache.cache) for cache in self.rows.recurrent)

    def _put_states(self, parents: Sequence[int]) -> None:
        """Puts the state of each row's parent into the caches; a text's first token has no parent."""
        if parents[0] < 0:
            for cache in self.rows.recurrent:
                cache.cache = [None] * len(cache.cache)
            return
        sources = [self._column_states[parent] for parent in parents]
        for layer, cache in enumerate(self.rows.recurrent):
            for i in range(len(cache.cache)):
                cache.cache[i] = gather_rows([(states[layer][i], row) for states, row in sources])


def gather_rows(rows: Sequence[Row], dtype: mx.Dtype = mx.float32) -> Array:
    """Returns the rows as one array; consecutive rows of one array are taken from it together. `dtype`: see
    `join_arrays`."""
    parts: list[Array] = []
    for _, group in groupby(rows, key=lambda row: id(row[0])):
        own = list(group)
        array, indices = own[0][0], [index for _, index in own]
        if not isinstance(array, mx.array):
            parts.append(array[indices])
            continue
        whole = indices == list(range(array.shape[0]))
        parts.append(array if whole else mx.take(array, mx.array(indices), axis=0))
    joined: Array = join_arrays(parts, dtype)
    return joined


def join_arrays(parts: Sequence[Any], dtype: mx.Dtype) -> Any:
    """Returns the parts as one array, which is numpy's if all are; else those of numpy are converted to `dtype`."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    arrays = [part if isinstance(part, mx.array) else mx.array(part).astype(dtype) for part in parts]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _group_by_depth(start: int, parents: Sequence[int]) -> list[list[int]]:
    """Groups the rows of a call by depth, parents before their children; a group's rows are adjacent."""
    depth = np.array(node_depths([max(parent - start, ROOT) for parent in parents]))
    levels = [np.flatnonzero(depth == level) for level in range(depth.max() + 1)]
    return [run.tolist() for rows in levels for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)]
