"""The tokens in the KV cache of a token tree, to compare with the committed text."""

from __future__ import annotations

from typing import Any


def column_tokens(tree: Any) -> list[int]:
    """Returns the token of every committed column of the cache, in order.

    The tree of a simulated drafter has no cache: it has a column for each committed token.
    """
    first = getattr(tree, "_origin", 0)
    tokens: list[int] = tree._committed[first : first + getattr(tree, "_columns", len(tree._committed))]
    return tokens
