"""Which token stands in which column of a tree's row, where in the text it is, and what it may see. Pure numpy.

Columns below `prefix` hold committed text, column i the token at position i, and every token sees them. Behind them is
the window: tokens in feeding order, each seeing the prefix, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engine.columns import Bools, Ints

_ROOM = 256  # columns in the window, to begin with


class Layout:
    """Columns 0..`end`-1; those below `prefix` are compact."""

    def __init__(self, prefix: int) -> None:
        self.prefix = self.end = prefix
        self._seen = np.zeros((_ROOM, _ROOM), dtype=np.bool_)
        self._positions = np.arange(prefix + _ROOM, dtype=np.int32)

    @property
    def positions(self) -> Ints:
        """The absolute position of the token in each column, [end]."""
        return self._positions[: self.end]

    def add(self, parents: Sequence[int]) -> int:
        """Appends a column behind each parent's (-1: at the text's start); a parent may be one appended before it.

        Returns the first new column.
        """
        start = self.end
        self._make_room(start - self.prefix + len(parents))
        for column, parent in enumerate(parents, start):
            inner = column - self.prefix
            if parent >= self.prefix:
                self._seen[inner] = self._seen[parent - self.prefix]
            else:
                self._seen[inner] = False  # what stood here before is gone
            self._seen[inner, inner] = True
            self._positions[column] = self._positions[parent] + 1 if parent >= 0 else 0
        self.end += len(parents)
        return start

    def seen(self, start: int) -> Bools:
        """What the columns from `start` on see: [end - start, end]."""
        visible = np.ones((self.end - start, self.end), dtype=np.bool_)
        visible[:, self.prefix :] = self._seen[start - self.prefix : self.end - self.prefix, : self.end - self.prefix]
        return visible

    def compact(self, committed: Sequence[int], pending: Sequence[int]) -> Ints:
        """Drops every window column but these (both ascending), `committed` ones joining the prefix.

        Returns `committed` + `pending`; the i-th of them is now column (old) `prefix` + i.
        """
        kept = np.array([*committed, *pending], dtype=np.int32)
        old = self.prefix
        self.prefix, self.end = old + len(committed), old + len(kept)
        inner = kept[len(committed) :] - old
        self._seen[: len(inner), : len(inner)] = self._seen[np.ix_(inner, inner)]
        self._positions[old : self.end] = self._positions[kept]
        return kept

    def _make_room(self, wanted: int) -> None:
        room = len(self._seen)
        if wanted > room:
            seen = np.zeros((2 * wanted, 2 * wanted), dtype=np.bool_)
            seen[:room, :room] = self._seen
            self._seen = seen
        if self.prefix + wanted > len(self._positions):
            longer = np.zeros(2 * (self.prefix + wanted), dtype=np.int32)
            longer[: len(self._positions)] = self._positions
            self._positions = longer
