"""What all forms of keys and values share: growing buffers, and what a model's own caches hold.

`with_room` grows buffers by more than is needed, so that they rarely grow. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from outrider.protocol.errors import OutriderError


class RollbackError(OutriderError):
    """The model's state can't be rolled back to this length."""


def is_attention(cache: Any) -> bool:
    """Returns whether `engine.flat.FlatCache` can replace this cache: it holds keys and values only."""
    return type(cache) in (KVCache, ConcatenateKVCache) or (type(cache) is RotatingKVCache and cache.keep == 0)


def window_of(cache: Any) -> int | None:
    """Returns how many tokens a layer with this cache sees; None: all."""
    return int(cache.max_size) if isinstance(cache, RotatingKVCache) else None


def stand_in(cache: Any, make: Callable[[Any], Any]) -> Any:
    """Replaces this cache, or each cache in a list of caches, by what `make` returns for it."""
    if type(cache) is CacheList:
        return CacheList(*(stand_in(inner, make) for inner in cache.caches))
    return make(cache)


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
