"""Helpers for mlx-lm's caches of a model, of every kind. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from outrider.protocol.errors import OutriderError


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
