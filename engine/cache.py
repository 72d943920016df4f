"""Helpers for every kind of KV cache: growing buffers, and mlx-lm's caches of a model. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from outrider.protocol.errors import OutriderError

BUFFER_STEP_COLUMNS = 256  # a buffer has a multiple of this many columns
MAX_EARLY_COLUMNS = 128  # layers grow their buffers up to this many columns early, each by a different number


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


def ensure_capacity(buffer: mx.array | None, rows: int, columns: int, like: mx.array, early: int = 0) -> mx.array:
    """Returns `buffer`, or a copy of it, larger than is needed now, if it has too few rows or columns.

    It is copied `early` columns before it must be; with a different `early` for each layer no forward copies all.
    """
    had_rows, had_columns = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    columns += early if buffer is not None else 0
    if rows <= had_rows and columns <= had_columns and buffer is not None:
        return buffer
    rows = had_rows if rows <= had_rows else max(rows, had_rows + had_rows // 2)
    columns = (
        had_columns
        if columns <= had_columns
        else -(-(columns + columns // 8) // BUFFER_STEP_COLUMNS) * BUFFER_STEP_COLUMNS
    )
    grown = mx.zeros((rows, like.shape[1], columns, like.shape[3]), like.dtype if buffer is None else buffer.dtype)
    if buffer is not None:
        grown[:had_rows, :, :had_columns] = buffer
    return grown
