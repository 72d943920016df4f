"""Keys and values from another source than the model: as bytes from another process, or from a reader of prompts.

`KVLayout` packs the keys and values of a piece of a text into bytes, from which another process with the same model
continues. Nothing is rounded: the bytes are in the model's own number format.

A `PromptReader` with the same weights reads prompts instead of the model (`engine.kv_rows`). Knows arrays; knows
nothing of messages or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine.cache import leaves_of
from outrider.engine.flat import Layers
from outrider.protocol.errors import OutriderError, ProtocolError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The order of a model's keys and values: layer after layer, keys before values.

    `tensors`: each one's shape for one token and its number format, [1, heads, 1, width].
    """

    tensors: tuple[mx.array, ...]

    @classmethod
    def of(cls, model: nn.Module) -> KVLayout:
        """Returns the layout of a model whose caches hold only keys and values; computes nothing."""
        caches: list[Any] = make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        arrays = [array for cache in caches for leaf in leaves_of(cache) for array in (leaf.keys, leaf.values)]
        return cls(tuple(mx.zeros((1, a.shape[1], 1, a.shape[3]), a.dtype) for a in arrays))

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def pack(self, layers: Layers) -> Bytes:
        """Packs keys and values of a piece, [1, heads, n, width] each, in the order of the layers."""
        arrays = (array for pair in layers for array in pair)
        typed = [array.astype(tensor.dtype) for array, tensor in zip(arrays, self.tensors, strict=True)]
        return np.concatenate([np.array(mx.contiguous(a).view(mx.uint8), copy=False).reshape(-1) for a in typed])

    def unpack(self, data: Bytes, count: int) -> Layers:
        """Unpacks keys and values of `count` tokens. Raises ProtocolError if their size is wrong."""
        if data.size != count * self.bytes_per_token:
            raise ProtocolError(
                f"keys and values of {count} tokens have {data.size} bytes; expected {self.bytes_per_token} for each"
                " token: run the same model on both sides"
            )
        arrays, end = [], 0
        for tensor in self.tensors:
            start, end = end, end + count * tensor.nbytes
            arrays.append(mx.array(data[start:end].reshape(1, tensor.shape[1], count, -1)).view(tensor.dtype))
        return tuple(zip(arrays[::2], arrays[1::2], strict=True))


class ReadingFault(OutriderError):
    """A reader can't continue; the model reads the rest itself."""


class PromptReader(Protocol):
    """Reads prompts instead of a model."""

    def readable(self, count: int) -> int:
        """Returns how many of a prompt's first `count` tokens it reads; 0: the model is faster."""
        ...

    def read(self, tokens: Sequence[int]) -> Iterator[Layers]:
        """Reads tokens from position 0 on, piece by piece, keys rotated. Raises ReadingFault if it can't continue."""
        ...
