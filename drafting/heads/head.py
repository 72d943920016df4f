"""The interface of a head: what reads the target's hidden rows. A new kind of head is one file that offers it.

A head is fed *pairs*: the *feature* of a token (made of the target's hidden row there) and the token behind it. It
answers each with a hidden vector of its own, which makes the logits of the token after, and stands in for the feature
that is not known yet where tokens are drafted behind one another. It remembers pairs as keys and values. It knows
nothing of texts, sampling or requests.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from outrider.engine.flat import FlatCache
from outrider.engine.taps import TapPoints


class Head(Protocol):
    """Arrays: T pairs, R rows, W the width of features, H that of the head, V the target's vocabulary."""

    @property
    def points(self) -> TapPoints:
        """Where the target is tapped for it."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def bytes_per_pair(self) -> int:
        """What it remembers of a pair."""
        ...

    def fuse(self, rows: mx.array) -> mx.array:
        """Features [R, W] of tapped rows [R, points * D], cheap enough to be made in the target's forward."""
        ...

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        """Hidden vectors [1, T, H] of pairs: tokens [1, T], features [1, T, W]."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[R, V] of hidden vectors [R, H]; -inf for tokens that it does not know."""
        ...

    def onward(self, hidden: mx.array) -> mx.array:
        """What stands in for the feature of the token that hidden vectors [R, H] have drafted: [R, W]."""
        ...
