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
from outrider.engine.flat import Floats, Layers
from outrider.protocol.errors import OutriderError, ProtocolError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class KVTensor:
    """A layer's keys, or its values: [1, heads, n, width] of `dtype`."""

    heads: int
    width: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * int(self.dtype.size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The order of a model's keys and values: layer after layer, keys before values, [heads, n, width] each."""

    tensors: tuple[KVTensor, ...]

    @classmethod
    def of(cls, model: nn.Module) -> KVLayout:
        """Returns the layout of a model whose caches hold only keys and values; computes nothing."""
        caches: list[Any] = make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        arrays = [array for cache in caches for leaf in leaves_of(cache) for array in (leaf.keys, leaf.values)]
        return cls(tuple(KVTensor(int(a.shape[1]), int(a.shape[3]), a.dtype) for a in arrays))

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self.tensors)

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
        for part in self.tensors:
            start, end = end, end + count * part.bytes_per_token
            shape = (1, part.heads, count, part.width * int(part.dtype.size))
            arrays.append(mx.array(data[start:end].reshape(shape)).view(part.dtype))
        return tuple(zip(arrays[::2], arrays[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Each layer's keys and values of n successive tokens: float32 [layers, kv_heads, n, head_dim], keys rotated."""

    keys: Floats
    values: Floats

    @property
    def count(self) -> int:
        return int(self.keys.shape[2])


class ReadingFault(OutriderError):
    """A reader can't continue; the model reads the rest itself."""


class PromptReader(Protocol):
    """Reads prompts instead of a model."""

    def readable(self, count: int) -> int:
        """Returns how many of a prompt's first `count` tokens it reads; 0: the model is faster."""
        ...

    def read(self, tokens: Sequence[int]) -> Iterator[KeysValues]:
        """Reads tokens from position 0 on, piece by piece. Raises ReadingFault if it can't continue."""
        ...
