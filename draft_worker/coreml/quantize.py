"""The three ways a weight matrix is held, each the very same numbers in MLX and in CoreML.

CoreML computes s * (q - z), MLX s * q + b, both in float16. They agree bit for bit when b = -z * s and when s has so few
significant bits that every product is exact in float16's eleven. Knows matrices; knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protocol.errors import ModelError

GROUP = 64
_INT4_SCALE_BITS = 7  # times a 4-bit number: 11 bits
_INT8_SCALE_BITS = 3  # times an 8-bit number: 11 bits
_SMALLEST = 2.0**-24  # float16's finest step


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
        return self.data.astype(np.float16) * self.scale


@dataclass(frozen=True, slots=True)
class Int4:
    """`scale` * (`data` - `zero`): data uint8 below 16 [rows, columns], scale float16 and zero uint8 [rows, groups]."""

    data: NDArray[np.uint8]
    scale: NDArray[np.float16]
    zero: NDArray[np.uint8]

    @property
    def values(self) -> NDArray[np.float16]:
        scale, zero = (np.repeat(x.astype(np.float16), GROUP, axis=1) for x in (self.scale, self.zero))
        return scale * (self.data.astype(np.float16) - zero)


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
    wide = dense.astype(np.float32)
    scale = _significant(np.abs(wide).max(axis=1, keepdims=True) / 127, _INT8_SCALE_BITS, np.ceil)
    scale = np.maximum(scale, np.float16(_SMALLEST))
    data = np.clip(np.rint(wide / scale.astype(np.float32)), -127, 127).astype(np.int8)
    return Int8(data, scale)


def int4(dense: NDArray[np.floating], name: str = "a weight", grid: Int4Grid | None = None) -> Int4:
    """`dense` [rows, columns] in groups of 64 along the row; `grid` is the one it was quantised on before, if any.

    Raises:
        ModelError: the columns do not divide into groups.
    """
    rows, columns = dense.shape
    if columns % GROUP:
        raise ModelError(f"{name} has {columns} columns; int4 needs a multiple of {GROUP} (use int8 or fp16)")
    grouped = dense.astype(np.float32).reshape(rows, columns // GROUP, GROUP)
    grid = grid or _grid(grouped)
    scale = np.maximum(_significant(grid.step, _INT4_SCALE_BITS, np.rint), np.float16(_SMALLEST))
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-grid.low / wide), 0, 15)
    data = np.clip(np.rint(grouped / wide[..., None]) + zero[..., None], 0, 15)
    return Int4(data.reshape(rows, columns).astype(np.uint8), scale, zero.astype(np.uint8))


def _grid(grouped: NDArray[np.float32]) -> Int4Grid:
    """Step and lowest value of each group, so that sixteen steps span it and zero."""
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
    """`x` >= 0 rounded to `bits` significant bits, on float16's grid."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    floor = np.maximum(exponent - bits, -24)
    return np.ldexp(rounding(np.ldexp(mantissa, exponent - floor)), floor).astype(np.float16)
