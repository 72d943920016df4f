"""The interface of a head, a drafter that reads the target's hidden states. A new kind of head is one file behind it.

A head is fed *pairs*: the *feature* of a token (made of the target's hidden row there) and the token behind it. From a
pair it makes a hidden vector, and from that the logits of the next token. It remembers pairs as keys and values. It
knows nothing of texts, sampling or requests.

There are three kinds. A `StepHead` drafts one token behind its last pair, and continues with its own vector in place of
the feature that is not known yet. A `MaskedHead` is fed the same pairs, then pairs of a mask, so that one forward
drafts several tokens. A `BlockHead` reads features alone, and drafts by a block of masks behind the last token, whose
rows all see each other.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.drafters.heads.layers import BlockLink
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import HiddenStatePoints

NO_NUMBERS = "the head's vectors are not numbers: its weights or the target's rows are beyond its number format"


class Head(Protocol):
    """Arrays: T pairs, R rows, W the width of features, H that of the head, V the target's vocabulary.

    `points`: where the target is tapped. `reach`: only so many of the newest pairs decide the draft; None: all do.
    """

    points: HiddenStatePoints
    context_length: int
    reach: int | None

    @property
    def weight_bytes(self) -> int: ...

    @property
    def bytes_per_pair(self) -> int:
        """The size of what it remembers of a pair."""
        ...

    def fuse(self, rows: mx.array) -> mx.array:
        """Features [R, W] of tapped rows [R, points * D], cheap enough to be made in the target's forward."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[R, V] of hidden vectors [R, H]; -inf for tokens that it does not know."""
        ...


class HeadModule(nn.Module):  # type: ignore[misc]
    """What most heads have in common."""

    reach: int | None = None
    together = True

    @property
    def weight_bytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.parameters()))


class PairHead(Head, Protocol):
    """Answers each pair with a hidden vector. `together`: one forward may hold several texts; else one at a time."""

    together: bool

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

    depth: int
    mask_token: int

    @property
    def mask_feature(self) -> mx.array:
        """[1, W]."""
        ...


GuessingHead = StepHead | MaskedHead
"""Goes on where a feature is not known: by its own vector, or by a learned one that stands for any feature."""


@runtime_checkable
class BlockHead(Head, Protocol):
    """Drafts up to `depth` tokens at once, as a block behind the features of all tokens before it.

    `from_anchor`: the block's first row, the last token's, drafts the first token; else the mask behind it does.
    `sees_prefixes`: it was trained to continue behind tokens of a block whose features are not known.
    """

    depth: int
    mask_token: int
    from_anchor: bool
    sees_prefixes: bool

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
