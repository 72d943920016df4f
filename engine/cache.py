"""What a target remembers of a text, with a rollback that either works or raises.

`LengthCache` holds keys and values of one attention layer and forgets by shortening itself, in O(1). State that can't
be shortened (a recurrent layer's) is kept by reference at marked lengths and put back. Knows nothing of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from outrider.protocol.errors import OutriderError

_STEP = 256
_MARKS_KEPT = 3


class RollbackError(OutriderError):
    """What came after a token can't be forgotten."""


class LengthCache:
    """Keys and values [1, H, capacity, D] of which the first `offset` columns count. Stands in for mlx-lm's `KVCache`.

    Sliding-window layers use it too, at full length: the window is in the mask, so that a rollback may cross it.
    No one else may hold a reference to `keys` or `values`: the next write would copy the whole buffer.
    """

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = _with_room(self.keys, keys, start)
        self.values = _with_room(self.values, values, start)
        self.keys[..., start : self.offset, :] = keys
        self.values[..., start : self.offset, :] = values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(n, offset=self.offset, return_array=return_array, window_size=window_size)

    @property
    def state(self) -> list[mx.array]:
        return [a for a in (self.keys, self.values) if a is not None]

    def empty(self) -> bool:
        return self.keys is None


def _with_room(buffer: mx.array | None, new: mx.array, used: int) -> mx.array:
    """`buffer` itself, or a copy of its used columns in one half as large again."""
    wanted = used + new.shape[2]
    if buffer is not None and wanted <= buffer.shape[2]:
        return buffer
    columns = -(-(wanted + used // 2) // _STEP) * _STEP
    grown = mx.zeros((*new.shape[:2], columns - used, new.shape[3]), new.dtype)
    return grown if buffer is None else mx.concatenate([buffer[..., :used, :], grown], axis=2)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The recurrent layers' states after `length` tokens: references, nothing is copied."""

    length: int
    states: tuple[tuple[Any, ...], ...]


class KVState:
    """All layers' caches of one text. `length` tokens have been fed."""

    def __init__(self, model: nn.Module) -> None:
        self.caches = [_suitable(cache) for cache in make_prompt_cache(model)]
        self.length = 0
        leaves = [leaf for cache in self.caches for leaf in _leaves(cache)]
        self._by_length = [leaf for leaf in leaves if isinstance(leaf, LengthCache)]
        self._recurrent = [leaf for leaf in leaves if isinstance(leaf, ArraysCache)]
        self._others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, LengthCache | ArraysCache)]
        self._marks: list[_Mark] = []

    @property
    def can_roll_back(self) -> bool:
        return not self._others

    @property
    def exact(self) -> bool:
        """True when a rollback reaches every length; otherwise only marked ones."""
        return not self._others and not self._recurrent

    @property
    def state(self) -> list[Any]:
        """Everything to evaluate so that what was fed is remembered."""
        return [cache.state for cache in self.caches]

    def mark(self) -> None:
        """Makes the present length one that a rollback can return to. The last few marks are kept."""
        if self._recurrent:
            self._marks.append(_Mark(self.length, tuple(tuple(cache.cache) for cache in self._recurrent)))
            del self._marks[:-_MARKS_KEPT]

    def roll_back(self, length: int) -> None:
        """Forgets what came after the first `length` tokens, or after the last mark before them: see `self.length`.

        Raises:
            RollbackError: the model keeps state that can't be put back, or nothing that early was marked.
        """
        if length >= self.length:
            if length > self.length:
                raise RollbackError(f"can't roll back to {length} tokens: only {self.length} have been fed")
            return
        if self._others:
            raise RollbackError(f"a {self._others[0]} can't be rolled back: decode this model without speculation")
        if self._recurrent:
            length = self._restore(length)
        for cache in self._by_length:
            cache.offset = length
        self.length = length

    def _restore(self, length: int) -> int:
        self._marks = [mark for mark in self._marks if mark.length <= length]
        if not self._marks:
            raise RollbackError(f"no state was marked at or before {length} tokens")
        mark = self._marks[-1]
        for cache, state in zip(self._recurrent, mark.states, strict=True):
            cache.cache = list(state)
        return mark.length


def _suitable(cache: Any) -> Any:
    if type(cache) in (KVCache, RotatingKVCache):
        return LengthCache()
    if type(cache) is CacheList:
        return CacheList(*(_suitable(inner) for inner in cache.caches))
    return cache


def _leaves(cache: Any) -> list[Any]:
    return [leaf for inner in cache.caches for leaf in _leaves(inner)] if type(cache) is CacheList else [cache]
