"""A prompt read by the package, its keys and values handed to an MLX model's caches.

The package keeps them as MLX does, [kv_heads, position, head_dim] after the rotation, so nothing is transposed or
computed again; what differs from an MLX prefill is float16 rounding. The package must be of the caches' own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from draft_worker.coreml.host import Host
from draft_worker.coreml.line import Line
from draft_worker.drafter import DrafterFault


class KeyValueCache(Protocol):
    """One layer's cache, as mlx-lm's KVCache."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> object:
        """Appends (1, kv_heads, n, head_dim) each."""
        ...


def prefill_into(
    host: Host,
    caches: Sequence[KeyValueCache],
    tokens: Sequence[int],
    dtype: mx.Dtype = mx.float16,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Reads `tokens` from position 0 and appends their keys and values to `caches`, one a layer, all of them empty.

    Raises:
        DrafterFault: the tokens do not fit the package's context, or the model has another number of layers.
    """
    layout, total = host.layout, len(tokens)
    if not 1 <= total <= layout.context:
        raise DrafterFault(f"{total} tokens to read; the package's context takes 1 to {layout.context}")
    if len(caches) != layout.architecture.layers:
        raise DrafterFault(f"{len(caches)} caches; the package's model has {layout.architecture.layers} layers")
    line, step = Line(host), layout.prefill.rows
    for first in range(0, total, step):
        fresh = line.feed(tokens[first : first + step], layout.prefill)
        if fresh.keys is not None and fresh.values is not None:
            _append(caches, fresh.keys, fresh.values, dtype)
        if progress:
            progress(line.length, total)
    line.close()


def _append(
    caches: Sequence[KeyValueCache], keys: NDArray[np.float32], values: NDArray[np.float32], dtype: mx.Dtype
) -> None:
    for cache, k, v in zip(caches, keys, values, strict=True):
        cache.update_and_fetch(mx.array(k[None]).astype(dtype), mx.array(v[None]).astype(dtype))
