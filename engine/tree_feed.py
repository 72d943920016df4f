"""Tokens for one token tree. Knows nothing of MLX, so that any drafter can be fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeFeed:
    """One token behind each parent, as `drafting.drafter.TokenTree.feed` takes them.

    `wanted`: so many tokens are to be asked for behind each, by what can draft several at once; (): nobody says.
    """

    parents: Sequence[int]
    tokens: Sequence[int | None]
    wanted: Sequence[int] = ()
