"""The in-process branch source: what followed the last time the text ended like this (prompt lookup).

Needs no worker, so it survives all of them. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 5
SHORTEST = 2


class NgramIndex:
    """The n-grams of one request's text, each with where it was last followed by something."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    @property
    def is_empty(self) -> bool:
        """Whether it was never given a token: nothing is to be found."""
        return not self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self._followed_at[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def lookup(self, length: int) -> tuple[int, ...]:
        """Up to `length` tokens that followed the longest known suffix; empty when no suffix is known."""
        for n in range(min(LONGEST, len(self._tokens)), SHORTEST - 1, -1):
            at = self._followed_at.get(tuple(self._tokens[-n:]))
            if at is not None:
                return tuple(self._tokens[at : at + length])
        return ()
