"""The three ways a weight matrix is held, each the very same numbers in MLX and in CoreML.

CoreML computes s * (q - z), MLX s * q + b, both in float16. They agree bit for bit when b = -z * s and when s has so
few significant bits that every product is exact in float16's eleven. Knows matrices; knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

GROUP = 64
_INT4_SCALE_BITS = 7  # times a 4-bit number: 11 bits
_INT8_SCALE_BITS = 3  # times an 8-bit number: 11 bits
_FINEST = -24  # the exponent of float16's smallest number
_BLOCK = 1 << 21


@dataclass(frozen=True, slots=True)
class Dense:
    """float16 or float32 [rows, columns]."""

    values: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Int8:
    """`data` int8 [rows, columns] times `scale` float16 [rows, 1]; symmetric."""

    data: NDArray[np.int8]
    scale: NDArray[np.float16]

    @property
    def values(self) -> NDArray[np.float16]:
        values = np.empty(self.data.shape, np.float16)
        for rows in _blocks(self.data):
            scale = self.scale[rows].astype(np.float32)
            values[rows] = self.data[rows].astype(np.float32) * scale  # exact: eleven bits
        return values


@dataclass(frozen=True, slots=True)
class Int4:
    """`scale` * (`data` - `zero`): data uint8 below 16 [rows, columns], scale float16 and zero uint8 [rows, groups]."""

    data: NDArray[np.uint8]
    scale: NDArray[np.float16]
    zero: NDArray[np.uint8]

    @property
    def values(self) -> NDArray[np.float16]:
        values = np.empty(self.data.shape, np.float16)
        for rows in _blocks(self.data):
            wide = self.data[rows].reshape(-1, self.scale.shape[1], GROUP).astype(np.float32)
            wide = (wide - self.zero[rows, :, None]) * self.scale[rows, :, None].astype(np.float32)
            values[rows] = wide.reshape(-1, self.data.shape[1])  # exact: eleven bits
        return values


Form = Dense | Int8 | Int4


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """The sixteen levels each group of an earlier quantisation had: `low` + `step` * i, float32 [rows, groups]."""

    step: NDArray[np.float32]
    low: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MlxTriple:
    """The same matrix as mlx.nn's quantised layers hold it (affine, groups of GROUP)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    def dequantized(self) -> NDArray[np.float16]:
        wide = mx.dequantize(self.weight, self.scales, self.biases, group_size=GROUP, bits=self.bits)
        return np.array(wide)


def int8(dense: NDArray[np.floating]) -> Int8:
    """`dense` [rows, columns] with one scale a row, of three significant bits."""
    data, scale = np.empty(dense.shape, np.int8), np.empty((dense.shape[0], 1), np.float16)
    for rows in _blocks(dense):
        wide = dense[rows].astype(np.float32)
        step = np.abs(wide).max(axis=1, keepdims=True) / 127
        scale[rows] = _significant(step, _INT8_SCALE_BITS, np.ceil)
        data[rows] = np.clip(np.rint(wide / scale[rows].astype(np.float32)), -127, 127)
    return Int8(data, scale)


def int4(dense: NDArray[np.floating], name: str = "a weight", grid: Int4Grid | None = None) -> Int4:
    """`dense` [rows, columns] in groups of 64 along the row; `grid` is the one it was quantised on before, if any.

    Raises:
        ModelError: the columns do not divide into groups.
    """
    count, columns = dense.shape
    if columns % GROUP:
        raise ModelError(f"{name} has {columns} columns; int4 needs a multiple of {GROUP} (use int8 or fp16)")
    data, scale = np.empty(dense.shape, np.uint8), np.empty((count, columns // GROUP), np.float16)
    zero = np.empty(scale.shape, np.uint8)
    for rows in _blocks(dense):
        grouped = dense[rows].astype(np.float32).reshape(-1, columns // GROUP, GROUP)
        levels = _levels(grouped) if grid is None else Int4Grid(grid.step[rows], grid.low[rows])
        scale[rows] = _significant(levels.step, _INT4_SCALE_BITS, np.rint)
        step = scale[rows].astype(np.float32)
        zero[rows] = np.clip(np.rint(-levels.low / step), 0, 15)
        steps = np.rint(grouped / step[..., None]) + zero[rows, :, None]
        data[rows] = np.clip(steps, 0, 15).reshape(-1, columns)
    return Int4(data, scale, zero)


def _blocks(matrix: NDArray[Any]) -> list[slice]:
    """Rows a few million numbers at a time, so that the float32 in between stays small."""
    rows = max(1, _BLOCK // matrix.shape[1])
    return [slice(first, first + rows) for first in range(0, matrix.shape[0], rows)]


def _levels(grouped: NDArray[np.float32]) -> Int4Grid:
    """Sixteen levels of each group that span it and zero."""
    low, high = np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)
    return Int4Grid((high - low) / 15, low)


def to_mlx(form: Int8 | Int4) -> MlxTriple:
    """The same numbers as mlx.nn.QuantizedLinear keeps them; columns must divide by GROUP."""
    if isinstance(form, Int8):
        data = (form.data.astype(np.int16) + 128).astype(np.uint32)
        scale = np.repeat(form.scale, data.shape[1] // GROUP, axis=1)
        return MlxTriple(_pack(data, 8), mx.array(scale), mx.array(scale * np.float16(-128)), 8)
    bias = -(form.zero.astype(np.float16) * form.scale)
    return MlxTriple(_pack(form.data.astype(np.uint32), 4), mx.array(form.scale), mx.array(bias), 4)


def _pack(data: NDArray[np.uint32], bits: int) -> mx.array:
    lanes = 32 // bits
    shifts = np.arange(lanes, dtype=np.uint32) * np.uint32(bits)
    words = data.reshape(data.shape[0], -1, lanes) << shifts
    return mx.array(np.bitwise_or.reduce(words, axis=-1).astype(np.uint32))


def _significant(x: NDArray[np.floating], bits: int, rounding: np.ufunc) -> NDArray[np.float16]:
    """`x` >= 0 rounded to `bits` significant bits on float16's grid; never 0."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    floor = np.maximum(exponent - bits, _FINEST)
    rounded = np.ldexp(rounding(np.ldexp(mantissa, exponent - floor)), floor)
    return np.asarray(np.maximum(rounded, 2.0**_FINEST), np.float16)
