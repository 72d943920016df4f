"""Prompts that something else has read: keys and values as bytes, and as a tree's columns.

`KVTensor`: what a model remembers of a piece of a text, as bytes from which another process with the same model goes
on. Nothing is rounded: the bytes are in the model's own number format. Knows arrays; nothing of messages or requests.

`ReadingFault`: a prompt read by something else than the model: its keys and values become columns, the model reads
what is left. Whoever reads must be of the same weights; how it reads is its own affair. One that fails costs the time
it took, no more: the model reads on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine.flat import Layers
from outrider.engine.kv_rows import Ints, KeysValues, KVRows, NewRows
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
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
    """How a model's keys and values lie: layer after layer, keys before values, [heads, n, width] each."""

    layers: tuple[tuple[KVTensor, KVTensor], ...]

    @classmethod
    def of(cls, model: nn.Module) -> KVLayout:
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

    def _parts(self) -> Iterable[KVTensor]:
        return (part for pair in self.layers for part in pair)


def _part(array: mx.array) -> KVTensor:
    return KVTensor(int(array.shape[1]), int(array.shape[3]), array.dtype)


def _raw(array: mx.array) -> Bytes:
    return np.array(mx.contiguous(array).view(mx.uint8), copy=False).reshape(-1)


log = logging.getLogger(__name__)


class ReadingFault(OutriderError):
    """A reader can't go on; the model reads the rest itself."""


class PromptReader(Protocol):
    """Reads prompts in a model's place."""

    def readable(self, count: int) -> int:
        """How many tokens of a prompt of `count` it would read, from the first on; 0: the model is better off alone."""
        ...

    def read(self, tokens: Sequence[int]) -> Iterator[KeysValues]:
        """Reads tokens from position 0 on, a piece at a time. Raises ReadingFault when it can't go on."""
        ...


class FillableKVRows(KVRows, Protocol):
    """Columns that take keys and values from elsewhere."""

    def adopt(self, start: int, read: KeysValues) -> None:
        """Fills the columns from `start` on."""
        ...


class PrefilledKVRows:
    """`KVRows` whose prompts `reader` reads where it is worth it."""

    def __init__(self, columns: FillableKVRows, reader: PromptReader) -> None:
        self._kv_rows, self._reader = columns, reader
        self.read = 0  # of the prompt, by the reader

    @property
    def lazy(self) -> bool:
        return self._kv_rows.lazy

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        done, wanted = start, self._reader.readable(len(tokens)) if start == 0 else 0
        log.debug("a reader takes %d of %d tokens", wanted, len(tokens))
        try:
            for piece in self._reader.read(tokens[:wanted]) if wanted else ():
                self._kv_rows.adopt(done, piece)
                done += piece.count
                if progress is not None and done < len(tokens):
                    progress(done, total)
        except ReadingFault as error:
            log.warning("%s; the model reads the prompt from token %d on", error, done)
        self.read += done - start
        self._kv_rows.prefill(tokens, progress, total, done)

    @staticmethod
    def forward(texts: Sequence[PrefilledKVRows], new: Sequence[NewRows]) -> mx.array:
        inner = [text._kv_rows for text in texts]
        return type(inner[0]).forward(inner, new)

    def keep(self, prefix: int, columns: Ints) -> None:
        self._kv_rows.keep(prefix, columns)

    @property
    def whole(self) -> bool:
        return self._kv_rows.whole

    def save(self, count: int) -> SavedPrefix:
        return self._kv_rows.save(count)

    def restore(self, start: CachedPrefix) -> None:
        self._kv_rows.restore(start)
