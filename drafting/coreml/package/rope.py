"""The rotation of every position, read off the model's own rope module by asking it to rotate unit vectors.

No rotary formula lives here, so each scaling that mlx-lm knows is right as soon as mlx-lm has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos` and `sin`, float32 [positions, head_dim / 2]: x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin by halves."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def probe(rope: Callable[..., mx.array], head_dim: int, positions: int) -> RopeTable:
    """The table of `rope` for positions 0 .. `positions` - 1.

    Raises:
        ModelError: `rope` is not a rotation of the two halves of a head (a traditional or partial rope).
    """
    half = head_dim // 2

    def rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
        wide = np.broadcast_to(x, (1, 1, positions, head_dim)).astype(np.float32)
        return np.asarray(rope(mx.array(wide), offset=0).astype(mx.float32)).reshape(positions, head_dim)

    first = np.concatenate([np.ones(half), np.zeros(half)]).astype(np.float32)
    turned = rotate(first)
    table = RopeTable(np.ascontiguousarray(turned[:, :half]), np.ascontiguousarray(turned[:, half:]))
    sample = np.random.default_rng(0).standard_normal(head_dim).astype(np.float32)
    if not np.allclose(rotate(sample), apply(table, sample), atol=_TOLERANCE * float(np.abs(sample).max())):
        raise ModelError(
            "this model's rope does not rotate the two halves of a head (a traditional or partial rope); "
            "the coreml graph does (use --draft-backend mlx for this one)"
        )
    return table


def apply(table: RopeTable, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x` [head_dim] rotated to every position of the table: [positions, head_dim]."""
    low, high = np.split(x, 2)
    return np.concatenate([low * table.cos - high * table.sin, high * table.cos + low * table.sin], axis=-1)
