"""Ropes with a position for each token; mlx-lm's own take only one offset for each row.

`patch_ropes` extends every attention's `rope`. The extension acts if a cache's `offset` is a vector with an entry for
each token of a single row, and on a CPU also for plain text if a table returns the same bits in a quarter of the time.
All other calls go to the rope itself. Plain decoding keeps mlx-lm's bits. Knows nothing of trees or caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.hidden_states import add_mixin

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Angles = tuple[mx.array, mx.array]
"""Cosines, and sines with the sign for the half that they are multiplied with: float32 [L, D] each."""

_CHUNK_POSITIONS = 512  # positions whose angles are tabulated at a time
_PROBE_POSITION = 3  # a position at which every pair is rotated


class RopeTable:
    """Cosines and sines of a rope by position, computed by the rope itself; all layers with the same rope share one.

    On the CPU MLX computes a rope by about fifteen operations in every layer; a table needs five, and the angles looked
    up for a forward's first layer serve the others.
    """

    def __init__(self, rope: Callable[..., mx.array], width: int, half: int) -> None:
        """`width`: the head's; dimension i < `half` is rotated with i + `half`, those from 2 `half` on are not."""
        self._rope, self._width, self._half = rope, width, half
        self._angles = np.zeros((2, 0, width), dtype=np.float32)
        # Looked up by the last forward's first layer, for the layers after it.
        self._latest: tuple[int | mx.array, int, Angles] | None = None
        self.exact = False  # True if for plain text it returns the same bits as the rope

    @classmethod
    def of(cls, rope: nn.Module, width: int) -> RopeTable | None:
        """Returns the table of a rope; None if it does not rotate halves by an angle proportional to the position."""
        if "Dynamic" in type(rope).__name__:  # its angles also depend on the length of the text
            return None
        rope = super(TokenRope, rope).__call__ if isinstance(rope, TokenRope) else rope  # type: ignore[misc]
        turned = np.array(rope(mx.eye(width)[:, None, None, :], offset=_PROBE_POSITION))[:, 0, 0, :]
        partners = np.argwhere((np.abs(turned) > 0) & ~np.eye(width, dtype=bool))
        halves = {abs(int(i) - int(j)) for i, j in partners}
        if len(halves) != 1:
            return None
        table = cls(rope, width, halves.pop())
        x = mx.array(np.random.default_rng(0).standard_normal((1, 1, 2, width)).astype(np.float32))
        same = []
        for position in (0, _PROBE_POSITION, 700):
            plain = rope(x, offset=position)
            if not mx.allclose(table(x, mx.array([position, position + 1])), plain, rtol=1e-4, atol=1e-4):
                return None
            same.append(bool(mx.array_equal(table(x, position), plain)))
        table.exact = all(same)
        return table

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Applies the rope to x [1, H, L, D], token l at position `offset` + l, or at offset[l]."""
        count = x.shape[-2]
        if self._latest is None or not _is_same_offset(self._latest[0], offset) or self._latest[1] != count:
            positions = np.array(offset) if isinstance(offset, mx.array) else np.arange(offset, offset + count)
            cos, sin = self.on_host(positions)
            self._latest = offset, count, (mx.array(cos), mx.array(sin))
        return self._rotate(x, self._latest[2])

    @property
    def rotates_whole_head(self) -> bool:
        """True if every dimension of the head is rotated."""
        return 2 * self._half == self._width

    def on_host(self, positions: Ints) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns cosines and signed sines at these positions: float32 [2, L, D]."""
        while positions.max() >= self._angles.shape[1]:
            self._grow()
        angles: np.ndarray[Any, np.dtype[np.float32]] = self._angles[:, positions]
        return angles

    def _rotate(self, x: mx.array, angles: Angles) -> mx.array:
        half, (cos, sin) = self._half, angles
        parts = [x[..., half : 2 * half], x[..., :half]]
        if 2 * half < self._width:
            parts.append(x[..., 2 * half :])
        return x * cos.astype(x.dtype) + mx.concatenate(parts, axis=-1) * sin.astype(x.dtype)

    def _grow(self) -> None:
        half, start = self._half, self._angles.shape[1]
        first = np.zeros((1, 1, _CHUNK_POSITIONS, self._width), dtype=np.float32)
        first[..., :half] = 1.0
        turned = np.array(self._rope(mx.array(first), offset=start))[0, 0]
        cos, sin = np.ones_like(turned), np.zeros_like(turned)
        cos[:, :half] = cos[:, half : 2 * half] = turned[:, :half]
        sin[:, :half], sin[:, half : 2 * half] = -turned[:, half : 2 * half], turned[:, half : 2 * half]
        self._angles = np.concatenate([self._angles, np.stack([cos, sin])], axis=1)


def _is_same_offset(known: int | mx.array, offset: int | mx.array) -> bool:
    if isinstance(known, mx.array) or isinstance(offset, mx.array):
        return known is offset  # a comparison of their numbers would wait
    return known == offset


class TokenRope:
    """A rope that also takes one offset per token if there is one row. Used by `add_mixin`; models share `_tables`."""

    _tables: dict[Any, RopeTable | None]
    _signature: Any

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **others: Any) -> Any:
        """Applies the rope. `others`: arguments that mlx-lm's ropes don't have; such a call goes to the rope itself."""
        own = super().__call__  # type: ignore[misc]
        if others or x.shape[0] != 1 or (isinstance(offset, mx.array) and offset.shape != (x.shape[-2],)):
            return own(x, offset=offset, **others)
        table, per_token = self._table(x.shape[-1]), isinstance(offset, mx.array)
        if table is not None and (per_token or (table.exact and x.dtype == mx.float32)):
            return table(x, offset)
        return own(x.swapaxes(0, 2), offset=offset).swapaxes(0, 2) if per_token else own(x, offset=offset)

    def _table(self, width: int) -> RopeTable | None:
        key = (self._signature, width)
        if key not in self._tables:
            on_cpu = mx.default_device().type == mx.cpu
            self._tables[key] = RopeTable.of(self, width) if on_cpu else None
        return self._tables[key]


def patch_ropes(model: nn.Module) -> None:
    """Extends the rope of every attention of `model`, once."""
    tables: dict[Any, RopeTable | None] = {}
    for module in model.modules():
        for name in ("rope", "rotary_emb"):
            rope = module.get(name) if isinstance(module, dict) else None
            if isinstance(rope, nn.Module):
                add_mixin(rope, TokenRope, _tables=tables, _signature=rope_signature(rope))


def rope_signature(rope: nn.Module) -> Any:
    plain = {k: v for k, v in vars(rope).items() if isinstance(v, int | float | bool | str)}
    arrays = {k: np.array(v.astype(mx.float32)).tobytes() for k, v in rope.items() if isinstance(v, mx.array)}
    return type(rope).__name__, tuple(sorted(plain.items())), tuple(sorted(arrays.items()))
