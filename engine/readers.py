"""Several readers of one model's hidden rows: what they read is tapped once, and each gets its own of it.

Knows rows of tokens; nothing of what readers make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.engine.taps import TapPoints


@dataclass(frozen=True, slots=True)
class Reader:
    """`fuse` makes what it reads, [N, W], of the rows that are tapped for it, [N, points * D]."""

    points: TapPoints
    fuse: Callable[[mx.array], mx.array]


class Readers:
    """`points` and `fuse` are for the `Taps` of them all; `apart` tells whose is what."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        """At least one."""
        self._readers = tuple(readers)
        self._parts: list[tuple[int, mx.Dtype]] = []
        points = [reader.points for reader in readers]
        self.points = TapPoints(
            tuple(sorted({layer for one in points for layer in one.layers})),
            any(one.before_norm for one in points),
            any(one.after_norm for one in points),
        )

    def fuse(self, rows: mx.array) -> mx.array:
        """What each reads, side by side."""
        columns = dict(zip(self.points.keys, mx.split(rows, self.points.count, axis=-1), strict=True))
        own = [
            reader.fuse(mx.concatenate([columns[key] for key in reader.points.keys], axis=-1))
            for reader in self._readers
        ]
        self._parts = [(part.shape[-1], part.dtype) for part in own]
        return own[0] if len(own) == 1 else mx.concatenate(own, axis=-1)

    def apart(self, features: mx.array) -> list[mx.array]:
        """Of what `fuse` made each reader's own, in their order and number formats."""
        if len(self._parts) == 1:
            return [features]
        found, begin = [], 0
        for width, dtype in self._parts:
            found.append(features[:, begin : begin + width].astype(dtype))
            begin += width
        return found
