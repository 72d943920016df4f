"""Rows of the target's that a head has been told and not yet fed: a stretch of consecutive committed tokens.

Knows positions and rows; nothing of tokens. Bounded: of a long stretch the newest are kept.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from outrider.engine.blocks import Floats

MOST = 2048

Row = tuple[mx.array | Floats, int]
"""A row, as one of an array's [N, W]."""


class Heard:
    """Rows of the positions `begin`..`end`-1."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._parts: list[tuple[int, Floats]] = []

    def add(self, position: int, rows: Floats) -> None:
        """The next ones, the first at `position`; behind a gap the stretch begins anew. What is known is left out."""
        end = position + rows.shape[0]
        if end <= self.end:
            return
        if not self.begin <= position <= self.end:
            self.begin, self._parts = position, []
        elif position < self.end:
            position, rows = self.end, rows[self.end - position :]
        self._parts.append((position, rows))
        self.end = end
        self.forget(end - MOST)

    def forget(self, position: int) -> None:
        """Rows before this position are not wanted any more."""
        if position > self.begin:
            self.begin = min(position, self.end)
            self._parts = [part for part in self._parts if part[0] + part[1].shape[0] > position]

    def __contains__(self, position: int) -> bool:
        return self.begin <= position < self.end

    def row(self, position: int) -> Row:
        """The row of a position that it has."""
        first, rows = next(part for part in self._parts if part[0] <= position < part[0] + part[1].shape[0])
        return rows, position - first

    def between(self, begin: int, end: int) -> Floats:
        """The rows of these positions, all of which it has: [end - begin, W]."""
        parts = [
            rows[max(begin - first, 0) : max(end - first, 0)]
            for first, rows in self._parts
            if first < end and begin < first + rows.shape[0]
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
