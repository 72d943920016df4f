"""The caches of one text that has its own forwards, with a rollback that works or raises; and growing buffers.

`LengthCache` holds keys and values of one attention layer; it rolls back in O(1) by a shorter length. State that can't
be shortened (a recurrent layer's) is kept by reference at marked lengths and restored; any other cache is copied at the
marks. `with_room` grows buffers by more than is needed, so that they rarely grow. Knows nothing of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import OutriderError

_MARKS_KEPT = 3


class RollbackError(OutriderError):
    """The model's state can't be rolled back to this length."""


class LayerCache:
    """Keys and values [rows, H, columns, D] of one attention layer, in buffers that grow."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def saved(self, length: int, row: int = 0, start: int = 0) -> tuple[mx.array, mx.array]:
        """Returns copies of a row's columns [start, length), lazy."""
        return first_rows(self.keys, length, row, start), first_rows(self.values, length, row, start)

    @property
    def state(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values) if a is not None]

    def empty(self) -> bool:
        return self.keys is None


class LengthCache(LayerCache):
    """Keys and values [1, H, capacity, D], of which the first `offset` columns are valid. Replaces mlx-lm's `KVCache`.

    Sliding-window layers use it too, at full length: the window is in the mask, so that a rollback can cross it.
    `window`: the columns that the layer sees if it passes no window, like one with a rotating cache; None: all. Keep no
    other reference to `keys` or `values`: the next write would then copy the whole buffer.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self._window = window
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = with_room(self.keys, 1, self.offset, keys)
        self.values = with_room(self.values, 1, self.offset, values)
        self.keys[..., start : self.offset, :] = keys
        self.values[..., start : self.offset, :] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns the valid columns, also for layers that share them. Raises AttributeError before any forward."""
        if self.keys is None or self.values is None:
            raise AttributeError("nothing has been fed yet")
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = narrowed(window_size or self._window, self.offset + n)
        return create_attention_mask(n, offset=self.offset, return_array=return_array, window_size=window)

    def adopt(self, keys: mx.array, values: mx.array) -> None:
        """Fills the first columns of an empty cache."""
        self.offset = keys.shape[2]
        self.keys, self.values = (with_room(None, 1, self.offset, part) for part in (keys, values))
        self.keys[..., : self.offset, :], self.values[..., : self.offset, :] = keys, values


def first_rows(buffer: mx.array | None, length: int, row: int = 0, start: int = 0) -> mx.array:
    """Returns a copy of a row's columns, [1, H, length - start, D]. Lazy; once evaluated it doesn't keep the buffer."""
    if buffer is None:
        raise RollbackError("nothing has been fed yet, so there is nothing to copy")
    return mx.contiguous(buffer[row : row + 1, :, start:length])


def is_attention(cache: Any) -> bool:
    """Returns whether `LengthCache` can replace this cache: it holds keys and values only (a window becomes a mask)."""
    return type(cache) in (KVCache, ConcatenateKVCache) or (type(cache) is RotatingKVCache and cache.keep == 0)


def window_of(cache: Any) -> int | None:
    """Returns how many tokens a layer with this cache sees; None: all."""
    return int(cache.max_size) if isinstance(cache, RotatingKVCache) else None


def narrowed(window: int | None, length: int) -> int | None:
    """Returns the window, or None for a text that is no longer than it."""
    return window if window is not None and length > window else None


@dataclass(frozen=True, slots=True)
class _Mark:
    """The layers' state after `length` tokens: recurrent states by reference, other caches as copies.

    MLX copies an array when one of two owners writes to it, so a copy costs nothing until then.
    """

    length: int
    states: tuple[tuple[Any, ...], ...]
    copies: tuple[dict[str, Any], ...]


class KVState:
    """The caches of all layers for one text. `length`: the tokens fed so far."""

    def __init__(self, model: nn.Module, own_caches: bool = False) -> None:
        """`own_caches`: use the model's own caches only (see `engine.load_checks.abilities`)."""
        made = make_prompt_cache(model)
        self.caches = made if own_caches else [stand_in(cache, _suitable) for cache in made]
        self.length = 0
        leaves = [leaf for cache in self.caches for leaf in leaves_of(cache)]
        self._by_length = [leaf for leaf in leaves if isinstance(leaf, LengthCache)]
        self._recurrent = [leaf for leaf in leaves if isinstance(leaf, ArraysCache)]
        self._others = [leaf for leaf in leaves if not isinstance(leaf, LengthCache | ArraysCache)]
        self._marks: list[_Mark] = []

    @property
    def marks_freely(self) -> bool:
        """True if a mark costs nothing; otherwise the next forward copies the marked caches."""
        return not self._others

    @property
    def exact(self) -> bool:
        """True when a rollback reaches every length; otherwise only marked ones."""
        return not self._others and not self._recurrent

    @property
    def state(self) -> list[Any]:
        """Everything to evaluate after a forward."""
        return [cache.state for cache in self.caches]

    def mark(self) -> None:
        """Makes the current length one that `roll_back` can return to. The last few marks are kept."""
        if self.exact:
            return
        states = tuple(tuple(cache.cache) for cache in self._recurrent)
        self._marks.append(_Mark(self.length, states, tuple(copy.deepcopy(vars(cache)) for cache in self._others)))
        del self._marks[: -(_MARKS_KEPT if self.marks_freely else 1)]

    def roll_back(self, length: int) -> None:
        """Rolls back to `length` tokens, or to the last mark before them; `self.length` is the result.

        Raises:
            RollbackError: the model keeps state that can't be shortened, and there is no mark that early.
        """
        if length >= self.length:
            if length > self.length:
                raise RollbackError(f"can't roll back to {length} tokens: only {self.length} have been fed")
            return
        if not self.exact:
            length = self._restore(length)
        for cache in self._by_length:
            cache.offset = length
        self.length = length

    def save(self, length: int) -> SavedPrefix:
        """Returns a copy of the state after `length` tokens, or at the last mark before them, evaluated.

        Raises:
            RollbackError: the model keeps state that can't be shortened, and there is no mark that early.
        """
        states: tuple[Any, ...] = ()
        if not self.exact:
            mark = self._mark_at(length)
            length, states = mark.length, (mark.states, mark.copies)
        saved = SavedPrefix(length, tuple(cache.saved(length) for cache in self._by_length), states)
        mx.eval(saved.layers, states)
        return saved

    def adopt(self, start: CachedPrefix) -> None:
        """Fills an empty text with a saved prefix."""
        for cache, (keys, values) in zip(self._by_length, start.saved.columns(start.length), strict=True):
            cache.adopt(keys, values)
        self.length = start.length
        if start.saved.states:
            states, copies = start.saved.states
            self._put_back(_Mark(start.length, states, copies))
        mx.eval(self.state)

    def _mark_at(self, length: int) -> _Mark:
        """Returns the mark at `length` tokens, or the last one before."""
        if self.length <= length:
            self.mark()
        marks = [mark for mark in self._marks if mark.length <= length]
        if not marks:
            raise RollbackError(f"no state was marked at or before {length} tokens")
        return marks[-1]

    def _restore(self, length: int) -> int:
        self._marks = [mark for mark in self._marks if mark.length <= length]
        if not self._marks:
            raise RollbackError(f"no state was marked at or before {length} tokens")
        self._put_back(self._marks[-1])
        return self._marks[-1].length

    def _put_back(self, mark: _Mark) -> None:
        for cache, state in zip(self._recurrent, mark.states, strict=True):
            cache.cache = list(state)
        for cache, held in zip(self._others, mark.copies, strict=True):
            vars(cache).update(copy.deepcopy(held))  # copied, since the mark may be restored again


def stand_in(cache: Any, make: Callable[[Any], Any]) -> Any:
    """Replaces this cache, or each cache in a list of caches, by what `make` returns for it."""
    if type(cache) is CacheList:
        return CacheList(*(stand_in(inner, make) for inner in cache.caches))
    return make(cache)


def _suitable(cache: Any) -> Any:
    return LengthCache(window_of(cache)) if is_attention(cache) else cache


def leaves_of(cache: Any) -> list[Any]:
    """Returns the caches in a list of caches, or this one cache."""
    return [leaf for inner in cache.caches for leaf in leaves_of(inner)] if type(cache) is CacheList else [cache]


_BUFFER_STEP = 256  # buffers grow by multiples of so many columns
EARLY = 128  # the range of columns over which the layers' buffers grow one after the other


def with_room(buffer: mx.array | None, rows: int, columns: int, like: mx.array, early: int = 0) -> mx.array:
    """Returns `buffer`, or a copy of it with room for so many rows and columns.

    It grows `early` columns before it must; with a different number for each layer, no forward copies all layers.
    """
    had_rows, had_columns = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    columns += early if buffer is not None else 0
    if rows <= had_rows and columns <= had_columns and buffer is not None:
        return buffer
    rows = had_rows if rows <= had_rows else max(rows, had_rows + had_rows // 2)
    columns = had_columns if columns <= had_columns else -(-(columns + columns // 8) // _BUFFER_STEP) * _BUFFER_STEP
    grown = mx.zeros((rows, like.shape[1], columns, like.shape[3]), like.dtype)
    if buffer is not None:
        grown[:had_rows, :, :had_columns] = buffer
    return grown
