"""A text's part of a flat row: how many tokens, in which columns, at which positions, and what each of them sees.

Ordinary text stands in columns one behind the other, each token at its column's position and seeing all before it. The
nodes of a tree of drafts have a column each, too, but the position of their depth, and see their ancestors only. Pure
numpy; knows nothing of tokens' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.protocol.trees import depths

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` tokens of the text in `row`, whose first `start` are remembered.

    `long`: part of a prompt. `whole`: they see each other, those ahead, too. With `parents` the last of them are nodes
    of a tree (`protocol.trees`), behind the last token that is none.
    """

    row: int
    start: int
    count: int
    long: bool = False
    whole: bool = False
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def trunk(self) -> int:
        """The first column of the tree's."""
        return self.end - len(self.parents)

    @property
    def positions(self) -> Ints:
        """Each token's, [count]."""
        places = np.arange(self.start, self.end, dtype=np.int32)
        if self.parents:
            places[-len(self.parents) :] = np.array(depths(self.parents)) + self.trunk
        return places

    def seen(self, end: int, window: int | None) -> Bools:
        """Which of its row's first `end` columns each token sees, [count, end]; within `window` positions, if any."""
        seen = np.tri(self.count, end, self.start, dtype=np.bool_)
        if self.whole:
            seen[:, : self.end] = True
        if self.parents:
            seen[-len(self.parents) :, self.trunk : self.end] = _ancestry(self.parents)
        if window is not None:
            places = np.arange(end)
            places[self.start : self.end] = self.positions
            seen &= places > self.positions[:, None] - window
        return seen


def _ancestry(parents: tuple[int, ...]) -> Bools:
    """Which nodes each is or stands behind, [M, M]."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen
