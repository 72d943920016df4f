"""Reads weight.bin, CoreML's blob storage, through a memory map: nothing is copied until it is used.

Each blob is a 64-byte header (sentinel, dtype, size, offset) and its bytes. Knows numbers of bits; knows nothing of
graphs.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

_HEADER = struct.Struct("<IIQQ")
_SENTINEL = 0xDEADBEEF
DTYPES: dict[str, type[np.generic]] = {
    "FLOAT16": np.float16, "FLOAT32": np.float32, "INT8": np.int8, "UINT8": np.uint8, "INT16": np.int16,
    "UINT16": np.uint16, "INT32": np.int32, "UINT32": np.uint32, "BOOL": np.bool_,
}  # fmt: skip


class BlobFile:
    """weight.bin at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The array whose header lies at `offset`; UINT4 comes as uint8, one number an item.

        Raises:
            ModelError: there is no such blob there.
        """
        header = self._bytes[offset : offset + _HEADER.size].tobytes()
        sentinel, _, size, start = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0, 0)
        count = int(np.prod(shape))
        expected = (count + 1) // 2 if dtype == "UINT4" else count * np.dtype(DTYPES[dtype]).itemsize
        if sentinel != _SENTINEL or size != expected or start + size > self._bytes.size:
            raise ModelError(
                f"{self._path} holds no {dtype} {list(shape)} at {offset}; it does not belong to this model.mlmodel"
            )
        data = self._bytes[start : start + size]
        return unpack4(data, count).reshape(shape) if dtype == "UINT4" else data.view(DTYPES[dtype]).reshape(shape)


def unpack4(data: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """`count` 4-bit numbers, the low half of each byte first."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[:count]
