"""The input of a token tree and the candidates after its nodes, without MLX, for all drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeFeed:
    """One token after each parent, for `drafters.drafter.TokenTree.feed`.

    `wanted`: how many tokens will be requested after each, for drafters of several tokens at once; (): not known.
    """

    parents: Sequence[int]
    tokens: Sequence[int | None]
    wanted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node; `gap`: the best score after that node minus this token's (nats, >= 0)."""

    token: int
    gap: float
