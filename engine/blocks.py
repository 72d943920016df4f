"""Dense layers for few rows on a CPU: weights in column blocks that a BLAS multiplies without packing them first.

A BLAS copies ("packs") the weights at every call, which for a handful of rows costs more than multiplying. Blocks small
enough for its small-matrix kernels are read once and in place: eight rows through a 3M-parameter draft take 0.5 ms, not
1.2 in numpy whole and 1.9 in MLX (docs/log.md). Values never change, only their order in memory.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

_WIDTH = 64  # columns of a block
# So much work OpenBLAS does without packing: more rows are multiplied part by part, each block by all parts in turn.
_SMALL = 10**6


class BlockedLinear:
    """x [R, K] -> x W + b [R, N], float32. Several layers that read the same input may be one `BlockedLinear`."""

    def __init__(self, layers: list[nn.Linear] | list[nn.Embedding]) -> None:
        """
        Raises:
            TypeError: a layer is not a plain dense one.
        """
        if any(type(layer).__name__ not in ("Linear", "Embedding", "HeadEmbedding") for layer in layers):
            raise TypeError(f"{type(layers[0]).__name__} is not a plain dense layer")
        weight = np.concatenate([host(layer.weight) for layer in layers])
        self.width = weight.shape[0]
        padded = np.pad(weight, ((0, -self.width % _WIDTH), (0, 0)))
        # [N, K] as stored -> [N / block, 1, K, block]
        self._blocks = np.ascontiguousarray(padded.reshape(-1, 1, _WIDTH, weight.shape[1]).swapaxes(2, 3))
        biases = [layer["bias"] for layer in layers if "bias" in layer]
        self._bias = np.concatenate([host(bias) for bias in biases]) if biases else None

    def __call__(self, x: Floats) -> Floats:
        count, _, depth, width = self._blocks.shape
        parts = max(-(-len(x) * depth * width // _SMALL), 1)
        each = -(-len(x) // parts)
        padded = x if parts * each == len(x) else np.pad(x, ((0, parts * each - len(x)), (0, 0)))
        rows = np.empty((parts, each, count, width), np.float32)
        # Each product where it belongs. "C": all parts while a block is in the cache, whatever `rows` look like.
        np.matmul(padded.reshape(parts, each, depth), self._blocks, out=rows.transpose(2, 0, 1, 3), order="C")
        found: Floats = rows.reshape(parts * each, count * width)[: len(x), : self.width]
        if self._bias is not None:
            found += self._bias
        return found


class Norm:
    """RMS normalisation of the last axis."""

    def __init__(self, layer: nn.RMSNorm) -> None:
        self._weight = host(layer.weight)
        self._eps = np.float32(layer.eps)

    def __call__(self, x: Floats) -> Floats:
        normed: Floats = np.square(x)
        mean = np.add.reduce(normed, axis=-1, keepdims=True)  # pairwise sums: a plain dot product loses digits here
        mean /= x.shape[-1]
        mean += self._eps
        np.divide(x, np.sqrt(mean, out=mean), out=normed)
        normed *= self._weight
        return normed


def host(array: mx.array) -> Floats:
    """A float32 copy that numpy owns."""
    return np.array(array.astype(mx.float32), dtype=np.float32)
