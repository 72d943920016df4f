"""Weights as constants of a graph under construction. All functions of a package share one copy on disk.

Sharing is by name (`weight_id`), so nothing is ever compared or hashed to find duplicates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.converter.quantize import Dense, Int4, Int8
from outrider.drafting.coreml.converter.weights import Weights
from outrider.drafting.coreml.package import quiet


class Constants:
    """Puts `weights` into whichever function is being built."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._mil = quiet.mil()
        self._mb = self._mil.Builder

    def matrix(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Rows [first, last) of the matrix `name` as a convolution weight (rows, columns, 1, 1)."""
        form = self._weights.matrices[name]
        rows = slice(first, last)
        key = name if last is None else f"{name}[{first}:{last}]"
        match form:
            case Dense(values):
                return self._const(key, _kernel(values[rows]))
            case Int8(data, scale):
                return self._mb.constexpr_blockwise_shift_scale(
                    data=self._const(f"{key}.data", _kernel(data[rows])),
                    scale=self._const(f"{key}.scale", _kernel(scale[rows])),
                )
            case Int4(data, scale, zero):
                return self._mb.constexpr_blockwise_shift_scale(
                    data=self._const(f"{key}.data", self._uint4(data[rows])),
                    scale=self._const(f"{key}.scale", _kernel(scale[rows])),
                    offset=self._const(f"{key}.zero", self._uint4(zero[rows])),
                )

    def bias(self, name: str) -> Any | None:
        vector = self._weights.vectors.get(f"{name}.bias")
        return None if vector is None else self._const(f"{name}.bias", vector)

    def vector(self, name: str, rank: int, axis: int) -> Any:
        """The vector `name` along `axis` of a tensor of this rank, 1 along the others."""
        vector = self._weights.vectors[name]
        shape = [1] * rank
        shape[axis] = vector.size
        return self._const(name, vector.reshape(shape))

    def _const(self, key: str, value: NDArray[Any]) -> Any:
        const = self._mb.const(val=value)
        const.op.weight_id = key
        return const

    def _uint4(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return _kernel(data.view(self._mil.types.np_uint4_dtype))  # a label, no copy


def _kernel(matrix: NDArray[Any]) -> NDArray[Any]:
    return matrix.reshape(*matrix.shape, 1, 1)
