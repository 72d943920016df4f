"""What a model remembers of a piece of a text, as bytes from which another process with the same model goes on.

Nothing is rounded: the bytes are in the model's own number format. Knows arrays; nothing of messages or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine.flat_rows import Layers
from outrider.protocol.errors import ProtocolError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Part:
    """A layer's keys, or its values: [1, heads, n, width] of `dtype`."""

    heads: int
    width: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * int(self.dtype.size)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model's keys and values lie: layer after layer, keys before values, [heads, n, width] each."""

    layers: tuple[tuple[Part, Part], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Of a model whose caches hold keys and values and nothing else; nothing is computed."""
        caches: list[Any] = make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        return cls(tuple((_part(cache.keys), _part(cache.values)) for cache in caches))

    @property
    def bytes_per_token(self) -> int:
        return sum(part.bytes_per_token for part in self._parts())

    def pack(self, layers: Layers) -> Bytes:
        """Keys and values of a piece, [1, heads, n, width] each, in the order of the layers."""
        arrays = (array for pair in layers for array in pair)
        return np.concatenate([_raw(array.astype(p.dtype)) for array, p in zip(arrays, self._parts(), strict=True)])

    def unpack(self, data: Bytes, count: int) -> Layers:
        """What was packed of `count` tokens.

        Raises:
            ProtocolError: there are more bytes than that, or fewer.
        """
        if data.size != count * self.bytes_per_token:
            raise ProtocolError(
                f"{data.size} bytes arrived as keys and values of {count} tokens; expected"
                f" {self.bytes_per_token} a token,"
                " as this model has them: run the same model on both sides"
            )
        arrays, end = [], 0
        for part in self._parts():
            start, end = end, end + count * part.bytes_per_token
            shape = (1, part.heads, count, part.width * int(part.dtype.size))
            arrays.append(mx.array(data[start:end].reshape(shape)).view(part.dtype))
        return tuple(zip(arrays[::2], arrays[1::2], strict=True))

    def _parts(self) -> Iterable[Part]:
        return (part for pair in self.layers for part in pair)


def _part(array: mx.array) -> Part:
    return Part(int(array.shape[1]), int(array.shape[3]), array.dtype)


def _raw(array: mx.array) -> Bytes:
    return np.array(mx.contiguous(array).view(mx.uint8), copy=False).reshape(-1)
