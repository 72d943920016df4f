"""The interface of a head: what reads the target's hidden rows. A new kind of head is one file that offers it.

A head is fed *pairs*: the *feature* of a token (made of the target's hidden row there) and the token behind it. What it
makes of them is a hidden vector a token to draft, and of that the token's logits. It remembers what it was fed as keys
and values. It knows nothing of texts, sampling or requests.

There are three kinds. A `StepHead` drafts one token behind its last pair, and goes on with its own vector in place of
the feature that is not known yet. A `MaskedHead` is fed the same pairs, and pairs of a mask behind them, so that one
forward drafts several tokens. A `BlockHead` reads the features alone, and drafts by a block of masks behind the last
token, whose rows all see each other.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx

from outrider.drafters.heads.layers import BlockLink
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import HiddenStatePoints


class Head(Protocol):
    """Arrays: T pairs, R rows, W the width of features, H that of the head, V the target's vocabulary."""

    @property
    def points(self) -> HiddenStatePoints:
        """Where the target is tapped for it."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def reach(self) -> int | None:
        """So many of the newest pairs decide what it says; None: all."""
        ...

    @property
    def bytes_per_pair(self) -> int:
        """What it remembers of a pair."""
        ...

    def fuse(self, rows: mx.array) -> mx.array:
        """Features [R, W] of tapped rows [R, points * D], cheap enough to be made in the target's forward."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[R, V] of hidden vectors [R, H]; -inf for tokens that it does not know."""
        ...


class PairHead(Head, Protocol):
    """Answers each pair with the hidden vector of the token behind it."""

    @property
    def together(self) -> bool:
        """Whether one forward may hold several texts; else they are fed one after the other."""
        ...

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        """Hidden vectors [1, T, H] of pairs: tokens [1, T], features [1, T, W]."""
        ...


@runtime_checkable
class StepHead(PairHead, Protocol):
    """Drafts one token after another."""

    def onward(self, hidden: mx.array) -> mx.array:
        """What stands in for the feature of the token that hidden vectors [R, H] have drafted: [R, W]."""
        ...


@runtime_checkable
class MaskedHead(PairHead, Protocol):
    """Drafts up to `depth` tokens at once: one behind its last pair, one behind each pair of a mask."""

    @property
    def depth(self) -> int: ...

    @property
    def mask_token(self) -> int: ...

    @property
    def mask_feature(self) -> mx.array:
        """[1, W]."""
        ...


GuessingHead = StepHead | MaskedHead
"""Goes on where a feature is not known: by its own vector, or by what it has learned to stand for any."""


@runtime_checkable
class BlockHead(Head, Protocol):
    """Drafts up to `depth` tokens at once, as a block behind the features of all tokens before it."""

    @property
    def depth(self) -> int: ...

    @property
    def mask_token(self) -> int: ...

    @property
    def from_anchor(self) -> bool:
        """Whether the block's first row, the last token's, drafts the first token; else the mask behind it does."""
        ...

    @property
    def sees_prefixes(self) -> bool:
        """Whether it has learned to go on behind tokens of a block that are known while their features are not."""
        ...

    @property
    def link(self) -> BlockLink | None:
        """What makes the block's tokens fit together."""
        ...

    def read(self, features: mx.array, caches: list[FlatCache]) -> None:
        """Remembers features [1, T, W]."""
        ...

    def block(self, tokens: mx.array, places: mx.array, caches: list[FlatCache]) -> mx.array:
        """Hidden vectors [1, T, H] of blocks: known tokens, then masks of each [1, T], at these `places` [T] in it."""
        ...
