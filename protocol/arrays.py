"""Numpy arrays as raw frames: little-endian items, last axis fastest. Whoever calls has checked kind and size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from outrider.protocol.errors import ProtocolError
from outrider.protocol.fields import Array
from outrider.protocol.schema import words

Buffer: TypeAlias = bytes | memoryview
FEW = 64


def read_array(size: tuple[int, ...], array: Array, place: str, frames: Iterator[Buffer]) -> np.ndarray[Any, Any]:
    """An array of this size, a read-only view of the next frame."""
    raw = next(frames, None)
    if raw is None:
        raise ProtocolError(f"{place} has no frame; expected its bytes in a frame of their own")
    wire = _wire(array.dtype)
    if len(raw) != math.prod(size) * wire.itemsize:
        raise ProtocolError(f"{place} has {len(raw)} bytes; expected {words(array)}, of size {size}")
    read: np.ndarray[Any, Any] = np.ndarray(size, wire, raw)
    _check_items(read, array, place)
    return read


def write_array(value: np.ndarray[Any, Any], array: Array, place: str, frames: list[Buffer]) -> tuple[Any, ...]:
    """What the header has of an array, whose bytes are appended to the frames, without a copy where that can be."""
    _check_items(value, array, place)
    frames.append(np.ascontiguousarray(value, _wire(array.dtype)).reshape(-1).view(np.uint8).data)
    return array.dtype, value.shape


@cache
def _wire(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _check_items(value: np.ndarray[Any, Any], array: Array, place: str) -> None:
    if array.low is not None and value.size and _least(value) < array.low:
        raise ProtocolError(f"{place} holds {value.min()}; expected no number under {array.low}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ProtocolError(f"{place} holds a number that is not finite; expected finite numbers")


def _least(value: np.ndarray[Any, Any]) -> Any:
    """numpy's own way costs more than all else there is to do for a few tokens."""
    return min(value.tolist()) if value.ndim == 1 and value.size <= FEW else value.min()
