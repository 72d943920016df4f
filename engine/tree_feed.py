"""What goes into a token tree and what may follow its nodes. Knows nothing of MLX, so that any drafter can use it.

`TreeFeed`: tokens for one token tree. Knows nothing of MLX, so that any drafter can be fed.

`Candidate`: what may follow a node of a token tree. Knows nothing of MLX, so that any drafter can speak of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeFeed:
    """One token behind each parent, as `drafters.drafter.TokenTree.feed` takes them.

    `wanted`: so many tokens are to be asked for behind each, by what can draft several at once; (): nobody says.
    """

    parents: Sequence[int]
    tokens: Sequence[int | None]
    wanted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node; `gap` is how far its score lies below the best of that node (nats, >= 0)."""

    token: int
    gap: float
