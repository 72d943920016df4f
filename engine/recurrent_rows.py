"""KV rows of models with recurrent state (hybrids of attention and recurrence): each token is a row of the batch.

A recurrent state can't be masked, so a forward over R tokens is a batch of R rows of one token, each with its parent's
state; every column keeps the state after it, by reference. Attention layers have one shared row of columns, which all
rows of the batch read. Implements `engine.kv_rows.KVRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from outrider.engine.cache import is_attention, leaves_of, window_of
from outrider.engine.flat import Bools, FlatCache, Ints, NodeSegment
from outrider.engine.kv_rows import NewRows, TreeRows
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import ModelError

States = tuple[tuple[mx.array, ...], ...]
"""One tuple for each recurrent layer; the first axis of each array is the forward's rows."""


@dataclass(frozen=True, slots=True)
class _After:
    """The recurrent state after a column: one row of a forward's states."""

    states: States
    row: int


class _BatchCache(FlatCache):
    """A row of columns that all rows of a batch, of one token each, write and read."""

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = super().make_mask(n, return_array, window_size)
        batched = isinstance(self._frame.alone, NodeSegment) and mask is not None
        return mask[:, None, None] if batched else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rows = keys.shape[0]
        if rows == 1:
            return super().update_and_fetch(keys, values)
        keys, values = super().update_and_fetch(keys.swapaxes(0, 2), values.swapaxes(0, 2))
        return mx.broadcast_to(keys, (rows, *keys.shape[1:])), mx.broadcast_to(values, (rows, *values.shape[1:]))


class _BatchRows(TreeRows):
    """One tree, whose tokens are the rows of a batch. Recurrent layers keep the model's own caches."""

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelError if the model has a kind of cache that can be neither masked nor kept by reference."""
        super().__init__(model.model)
        leaves = [leaf for cache in self._caches for leaf in leaves_of(cache)]
        self.recurrent = [leaf for leaf in leaves if isinstance(leaf, ArraysCache)]
        for leaf in leaves:
            if type(leaf) not in (_BatchCache, ArraysCache):
                raise ModelError(
                    f"{model.model_type} keeps a {type(leaf).__name__}, which can't be copied for branches"
                )

    def _stand_in(self, early: int, cache: Any) -> Any:
        return _BatchCache(self._frame, window_of(cache), early) if is_attention(cache) else cache

    def batch(self, tokens: mx.array, row: int, start: int, positions: Ints, seen: Bools) -> mx.array:
        """Feeds tokens [R], each as a row of a batch. Returns their logits [R, V]. Lazy."""
        self._frame.begin([NodeSegment(row, start, tokens.shape[0], places=positions, visible=seen)])
        logits: mx.array = self.model(tokens[:, None], cache=self._caches)
        return logits[:, 0]


class RecurrentKVRows:
    """`KVRows` of a model with recurrent layers."""

    lazy = True
    whole = True

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelError if the model has a kind of cache that can be neither masked nor kept by reference."""
        self._rows = _BatchRows(model)
        self._sequence = self._rows.open()
        self._recurrent = self._rows.recurrent
        self._after: dict[int, _After] = {}

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        if start == len(tokens):
            return
        self._put_states([start - 1])
        self._rows.prefill(self._sequence, tokens, progress, total, start)
        self._after = {len(tokens) - 1: _After(self._states(), 0)}

    @staticmethod
    def forward(texts: Sequence[RecurrentKVRows], new: Sequence[NewRows]) -> mx.array:
        """Feeds one tree after another, because each puts its own state into the caches."""
        logits = [text._alone(rows) for text, rows in zip(texts, new, strict=True)]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _alone(self, new: NewRows) -> mx.array:
        tokens, start, positions, seen, parents = new.lazy_tokens(), new.start, new.positions, new.seen, new.parents
        logits: list[mx.array] = []
        order: list[int] = []
        for level in _levels(start, parents):
            columns = [start + row for row in level]
            # The rows of a forward must write adjacent columns.
            for first, last in _runs(columns):
                rows = list(range(first - start, last - start + 1))
                self._put_states([parents[row] for row in rows])
                batch = tokens[first - start : last - start + 1]
                own = positions[: last + 1], seen[rows, : last + 1]
                logits.append(self._rows.batch(batch, self._sequence.row, first, *own))
                states = self._states()
                self._after.update({start + row: _After(states, i) for i, row in enumerate(rows)})
                order += rows
        if len(logits) == 1:
            return logits[0]
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.concatenate(logits)[mx.array(back)]

    def keep(self, prefix: int, columns: Ints) -> None:
        self._sequence.keep(prefix, columns)
        kept = [(prefix - 1, prefix - 1), *enumerate(columns.tolist(), prefix)]
        self._after = {new: self._after[old] for new, old in kept if old in self._after}

    def save(self, count: int) -> SavedPrefix:
        after = self._after[count - 1]
        states = tuple(tuple(a[after.row : after.row + 1] for a in own) for own in after.states)
        mx.eval(states)
        return replace(self._rows.save(self._sequence, count), states=states)

    def restore(self, start: CachedPrefix) -> None:
        self._rows.adopt(self._sequence, start)
        self._after = {start.length - 1: _After(start.saved.states, 0)}

    def close(self) -> None:
        """Does nothing: the tree has buffers of its own."""

    def _states(self) -> States:
        return tuple(tuple(cache.cache) for cache in self._recurrent)

    def _put_states(self, parents: Sequence[int]) -> None:
        """Puts the state of each row's parent into the caches; a text's first token has no parent."""
        if parents[0] < 0:
            for cache in self._recurrent:
                cache.cache = [None] * len(cache.cache)
            return
        sources = [self._after[parent] for parent in parents]
        for layer, cache in enumerate(self._recurrent):
            for i in range(len(cache.cache)):
                cache.cache[i] = _gather([(source.states[layer][i], source.row) for source in sources])


def _gather(rows: Sequence[tuple[mx.array, int]]) -> mx.array:
    """Returns one array of these rows; rows of a single array are taken in one operation."""
    first = rows[0][0]
    if all(array is first for array, _ in rows):
        picks = [row for _, row in rows]
        return first if picks == list(range(first.shape[0])) else first[mx.array(picks)]
    return mx.concatenate([array[row : row + 1] for array, row in rows])


def _levels(start: int, parents: Sequence[int]) -> list[list[int]]:
    """Returns the rows of a call by their depth, parents before their children."""
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent - start] + 1 if parent >= start else 0)
    return [[row for row, d in enumerate(depth) if d == level] for level in range(max(depth) + 1)]


def _runs(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ranges of adjacent columns: (first, last), both included."""
    runs: list[tuple[int, int]] = []
    for column in columns:
        if runs and runs[-1][1] == column - 1:
            runs[-1] = (runs[-1][0], column)
        else:
            runs.append((column, column))
    return runs
