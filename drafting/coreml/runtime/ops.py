"""The operations of our graphs in numpy: what Core ML's documentation says they compute, nothing of how fast.

Every function takes float32, int32 or bool arrays by CoreML's argument names and returns one array or a list of them.
Rounding to float16 is the interpreter's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Op: TypeAlias = Callable[..., Array | list[Array]]


def conv(x: Array, weight: Array, bias: Array | None = None, **_: Array) -> Array:
    """A 1x1 convolution: (1, in, 1, n) by (out, in, 1, 1)."""
    rows = weight.reshape(weight.shape[:2]) @ x.reshape(x.shape[1], x.shape[3])
    if bias is not None:
        rows = rows + bias[:, None]
    return np.asarray(rows).reshape(1, weight.shape[0], 1, x.shape[3])


def matmul(x: Array, y: Array, transpose_x: Array | bool = False, transpose_y: Array | bool = False) -> Array:
    x = np.swapaxes(x, -1, -2) if transpose_x else x
    y = np.swapaxes(y, -1, -2) if transpose_y else y
    return np.asarray(np.matmul(x, y))


def softmax(x: Array, axis: Array) -> Array:
    shifted = np.exp(x - x.max(axis=int(axis), keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=int(axis), keepdims=True))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Array:
    return np.asarray(1 / np.sqrt(x + epsilon))


def concat(values: list[Array], axis: Array, interleave: Array | bool = False) -> Array:
    if interleave:
        raise NotImplementedError("concat with interleave")
    return np.concatenate(values, axis=int(axis))


def split(x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None) -> list[Array]:
    if split_sizes is None:
        return np.split(x, int(num_splits if num_splits is not None else 1), axis=int(axis))
    return np.split(x, np.cumsum(split_sizes)[:-1], axis=int(axis))


def slice_update(
    x: Array, update: Array, begin: Array, end: Array, begin_mask: Array | None = None, end_mask: Array | None = None
) -> Array:
    """`x` with [begin, end) replaced; a masked begin or end reaches to the edge."""
    window = []
    for axis in range(x.ndim):
        first = None if begin_mask is not None and begin_mask[axis] else int(begin[axis])
        last = None if end_mask is not None and end_mask[axis] else int(end[axis])
        window.append(slice(first, last))
    result = x.copy()
    result[tuple(window)] = update
    return result


def blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """scale * (data - offset), each scale standing for a block of the data."""
    for axis in range(data.ndim):
        block = data.shape[axis] // scale.shape[axis]
        if block > 1:
            scale = np.repeat(scale, block, axis)
            offset = None if offset is None else np.repeat(offset, block, axis)
    shifted = data.astype(np.float32) if offset is None else data.astype(np.float32) - offset
    return np.asarray(scale * shifted)


def _reduce(function: Callable[..., Any]) -> Op:
    def reduce(x: Array, axes: Array, keep_dims: Array | bool = False) -> Array:
        return np.asarray(function(x, axis=tuple(int(axis) for axis in axes), keepdims=bool(keep_dims)))

    return reduce


def _binary(function: Callable[..., Any]) -> Op:
    def binary(x: Array, y: Array) -> Array:
        return np.asarray(function(x, y))

    return binary


OPS: dict[str, Op] = {
    "abs": lambda x: np.asarray(np.abs(x)),
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "real_div": _binary(np.divide),
    "maximum": _binary(np.maximum),
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "reduce_sum": _reduce(np.sum),
    "rsqrt": rsqrt,
    "softmax": softmax,
    "silu": silu,
    "conv": conv,
    "matmul": matmul,
    "concat": concat,
    "split": split,
    "reshape": lambda x, shape: np.reshape(x, tuple(int(size) for size in shape)),
    "transpose": lambda x, perm: np.transpose(x, tuple(int(axis) for axis in perm)),
    "slice_update": slice_update,
}
