"""DFlash2's convolution over the rows of a block, whose kernel each row makes for itself."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class BlockConvolution(nn.Module):  # type: ignore[misc]
    """Two of them, one before and one behind a layer's part; both kernels are made of what goes into the first."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        """`taps`: how many rows each sees, its own first. `group`: how many numbers share what a row adds."""
        super().__init__()
        self._taps, self._group = taps, group
        self.base_kernel = mx.zeros((2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def __call__(self, inner: Callable[[mx.array], mx.array], x: mx.array, places: mx.array) -> mx.array:
        """Of rows [1, T, H] at these places in their blocks [T]."""
        own = self.kernel_projection(x).reshape(x.shape[1], 2, self._taps, -1)
        kernels = self.base_kernel + mx.repeat(own, self._group, axis=-1)
        before = _convolved(x, kernels[:, 0], places)
        return _convolved(inner(before), kernels[:, 1], places)


def _convolved(x: mx.array, kernel: mx.array, places: mx.array) -> mx.array:
    """Row by row, kernel [T, taps, H]; nothing comes from another block."""
    found = kernel[:, 0] * x
    for back in range(1, kernel.shape[1]):
        earlier = mx.where((places >= back)[:, None], mx.roll(x, back, axis=1), 0)  # type: ignore[call-arg]
        found = found + kernel[:, back] * earlier
    return found
