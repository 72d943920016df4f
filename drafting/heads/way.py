"""How chains come of a head, which differs with its kind: one token after another, or several in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from outrider.drafting.heads.line import Line
from outrider.drafting.heads.pairs import PairFeed, Reader


class Way(Protocol):
    """Drafts with one head. What it feeds behind true pairs stays in the texts; their length is the caller's."""

    @property
    def texts(self) -> Reader:
        """What the head remembers."""
        ...

    @property
    def depth(self) -> int:
        """The most tokens of a chain."""
        ...

    def draft(self, lines: Sequence[Line], feeds: Sequence[PairFeed]) -> mx.array:
        """Reads each line's last true pairs and chooses its chain behind them, its `depth` tokens.

        Lines stand in the order of their rows. Lazy where nothing looks at tokens; what comes back tells, evaluated,
        whether the vectors were numbers.
        """
        ...


class TriedWay(Way, Protocol):
    """One whose pairing can be tried."""

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        """The likeliest token behind each pair of a text by what it has read up to there, [T]."""
        ...
