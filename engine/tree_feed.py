"""What goes into a token tree and what may follow its nodes, without MLX, so that any drafter can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeFeed:
    """One token behind each parent, as `drafters.drafter.TokenTree.feed` takes them.

    `wanted`: how many tokens will be asked for behind each, for what drafts several at once; (): not known.
    """

    parents: Sequence[int]
    tokens: Sequence[int | None]
    wanted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node; `gap` is how far its score lies below the best of that node (nats, >= 0)."""

    token: int
    gap: float
