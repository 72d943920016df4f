"""The committed columns of a token tree, which tests compare with the committed tokens."""

from __future__ import annotations

from typing import Any


def column_tokens(tree: Any) -> list[int]:
    """Returns the token of every committed column, in order; a simulated tree has one for each token."""
    first = getattr(tree, "_origin", 0)
    tokens: list[int] = tree._committed[first : first + getattr(tree, "_columns", len(tree._committed))]
    return tokens
