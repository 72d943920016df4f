"""The rows of all texts of a model in the buffers of its layers (`engine.flat`), and helpers for mlx-lm's caches.

Knows rows and lengths; knows nothing of tokens.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from outrider.engine.flat import FlatAttentionMetadata, FlatCache, Ints, LayerKVs, patch_attention
from outrider.engine.prompt_cache import SavedPrefix
from outrider.protocol.errors import OutriderError

_MAX_MARKS = 3


class RollbackError(OutriderError):
    """The model's state can't be rolled back to this length."""


def is_attention(cache: Any) -> bool:
    """Returns whether `engine.flat.FlatCache` can replace this cache: it holds keys and values only."""
    return type(cache) in (KVCache, ConcatenateKVCache) or (type(cache) is RotatingKVCache and cache.keep == 0)


def window_of(cache: Any) -> int | None:
    """Returns the attention window of a layer with this cache, in tokens; None: it sees all tokens."""
    return int(cache.max_size) if isinstance(cache, RotatingKVCache) else None


def replace_caches(cache: Any, make: Callable[[Any], Any]) -> Any:
    """Returns `make(cache)`, or for a `CacheList` one in which each cache is replaced in this way."""
    if type(cache) is CacheList:
        return CacheList(*(replace_caches(inner, make) for inner in cache.caches))
    return make(cache)


def flatten_caches(cache: Any) -> list[Any]:
    """Returns the caches in a `CacheList`, nested ones included, or a list of this one cache."""
    return [leaf for inner in cache.caches for leaf in flatten_caches(inner)] if type(cache) is CacheList else [cache]


class FlatSequence:
    """A text, with a row of `rows`. `length`: the tokens fed so far; `caches`: the layers' own, if it has some.

    Columns roll back in O(1) by a shorter length. State that can't be shortened, in the `leaves` among the caches, is
    restored to marked lengths: a recurrent layer's is kept by reference, any other is copied. `exact`: there is none.
    """

    def __init__(self, row: int, rows: FlatRows, layers: Sequence[FlatCache], caches: Sequence[Any] = ()) -> None:
        self.row, self.length, self.rows, self._layers, self.caches = row, 0, rows, layers, caches
        leaves = (leaf for cache in caches for leaf in flatten_caches(cache))
        self.leaves = [leaf for leaf in leaves if not isinstance(leaf, FlatCache)]
        self.exact = not self.leaves
        self._marks: list[SavedPrefix] = []  # of the leaves only

    @property
    def has_free_marks(self) -> bool:
        """True if a mark costs nothing, so that a step which may have to be rolled back is worth starting.

        False if marks are copies, or if forwards are computed immediately, as by ONNX Runtime.
        """
        return self.rows.is_lazy and all(isinstance(leaf, ArraysCache) for leaf in self.leaves)

    def mark(self) -> None:
        """Makes the current length one that `roll_back` can return to. The last few marks are kept."""
        if self.exact:
            return
        self._marks.append(SavedPrefix(self.length, (), tuple(_copy_state(leaf, vars(leaf)) for leaf in self.leaves)))
        del self._marks[: -(_MAX_MARKS if self.has_free_marks else 1)]

    def roll_back(self, length: int) -> None:
        """Rolls back to `length` tokens, or to the last mark before them; `self.length` is the result. The next forward
        overwrites the later columns.

        Raises:
            RollbackError: the model keeps state that can't be shortened, and there is no mark that early.
        """
        if length < self.length and not self.exact:
            self._marks = [mark for mark in self._marks if mark.length <= length]
            length = self.mark_at(length).length
            self.restore(self._marks[-1].states)
        self.length = min(length, self.length)

    def mark_at(self, length: int) -> SavedPrefix:
        """Returns the mark at `length` tokens, or the last one before. Raises RollbackError as `roll_back` does."""
        if self.exact:
            return SavedPrefix(length, ())
        if self.length <= length:
            self.mark()
        marks = [mark for mark in self._marks if mark.length <= length]
        if not marks:
            raise RollbackError(f"no state was marked at or before {length} tokens")
        return marks[-1]

    def restore(self, states: tuple[Any, ...]) -> None:
        """Restores the states of a mark. They are copied, since the same mark may be restored again."""
        for leaf, state in zip(self.leaves, states, strict=True):
            vars(leaf).update(_copy_state(leaf, state))

    def keep(self, length: int, columns: Sequence[int] | Ints) -> None:
        """Keeps only these columns (ascending) after the first `length` tokens."""
        kept = np.asarray(columns, np.int32)
        moved = np.flatnonzero(kept != np.arange(length, length + len(kept)))
        for cache in self._layers if len(moved) else ():
            cache.gather(self.row, length + int(moved[0]), kept[moved[0] :])
        self.length = length + len(kept)


def _copy_state(leaf: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Copies a cache's attributes; those of recurrent layers by reference.

    MLX copies an array when one of two owners writes to it, so a copy costs nothing until then.
    """
    return {"cache": list(state["cache"])} if isinstance(leaf, ArraysCache) else copy.deepcopy(state)


class FlatRows:
    """One buffer for each layer of `model`, for all texts. Rows in use come first, so a forward sees a block of rows.

    `is_lazy`: logits are computed when they are read, not by the forward itself. `together`: a forward reads the
    weights once for all its texts.
    """

    together = True
    _cache_type = FlatCache

    def __init__(self, model: nn.Module, is_lazy: bool = True, own_caches: bool = False) -> None:
        """`own_caches`: use no buffers."""
        if self.together:
            patch_attention(model)
        self.is_lazy, self._own_caches = is_lazy, own_caches
        self._frame = FlatAttentionMetadata()
        self._caches = [replace_caches(cache, self._replacement_for) for cache in make_prompt_cache(model)]
        leaves = [leaf for cache in self._caches for leaf in flatten_caches(cache)]
        self._layers: list[FlatCache] = [leaf for leaf in leaves if isinstance(leaf, FlatCache)]
        self._sequences: list[FlatSequence] = []
        self._dropped: deque[FlatSequence] = deque()

    def _replacement_for(self, cache: Any) -> Any:
        """Returns a `FlatCache` for one of the model's own caches, or that cache."""
        return self._cache_type(self._frame, window_of(cache)) if self._is_flat(cache) else cache

    def _is_flat(self, cache: Any) -> bool:
        return is_attention(cache) and not self._own_caches

    def _sequence(self, row: int) -> FlatSequence:
        return FlatSequence(row, self, self._layers)

    def open(self) -> FlatSequence:
        """Adds an empty text."""
        while self._dropped:
            self.close(self._dropped.popleft())
        self._sequences.append(self._sequence(len(self._sequences)))
        return self._sequences[-1]

    def drop(self, sequence: FlatSequence) -> None:
        """Closes a text, if it is open, at the next `open`; for finalizers, which run at any moment."""
        self._dropped.append(sequence)

    def close(self, sequence: FlatSequence) -> None:
        """Frees a text's row and moves the last row there. After the last text also frees the buffers, except those of
        ONNX Runtime: its bindings belong to them, so new ones would slow rounds down."""
        if sequence.row < 0:
            return
        last = self._sequences.pop()
        if last is not sequence:
            for cache in self._layers:
                cache.move(last.row, sequence.row, last.length)
                cache.release(sequence.row, last.length)
            last.row = sequence.row
            self._sequences[sequence.row] = last
        sequence.row = -1
        longest = max((other.length for other in self._sequences), default=0)
        for cache in self._layers:
            if self.is_lazy and not self._sequences:
                cache.clear()
                continue
            cache.release(len(self._sequences))
            cache.shorten(longest)

    def save(self, sequence: FlatSequence, length: int) -> SavedPrefix:
        """Returns a copy of the state after a text's first `length` tokens, or fewer if it can't be shortened to that.

        Raises:
            RollbackError: the model keeps state that can't be shortened, and there is no mark that early.
        """
        mark = sequence.mark_at(length)
        mx.eval(mark.states)
        return SavedPrefix(mark.length, self.segment(sequence, 0, mark.length), mark.states)

    def adopt(self, sequence: FlatSequence, start: SavedPrefix) -> None:
        """Fills an empty text with a saved prefix."""
        layers = tuple((k[..., : start.length, :], v[..., : start.length, :]) for k, v in start.layers)
        if not sequence.exact:
            sequence.restore(start.states)
        self.extend(sequence, layers, start.length)

    def extend(self, sequence: FlatSequence, layers: LayerKVs, count: int) -> None:
        """Appends keys and values of `count` tokens to a text: [1, H, count, D] of each layer."""
        for cache, (keys, values) in zip(self._layers, layers, strict=True):
            cache.adopt(sequence.row, keys, values, sequence.length)
        sequence.length += count
        mx.eval(self.state())

    def segment(self, sequence: FlatSequence, start: int, end: int) -> LayerKVs:
        """Returns copies of a text's keys and values [start, end), as `extend` takes them, evaluated."""
        layers = tuple(cache.copy_columns(end, sequence.row, start) for cache in self._layers)
        mx.eval(layers)
        return layers

    def state(self) -> list[Any]:
        """Returns everything to evaluate after a forward."""
        return [cache.state for cache in self._caches]
