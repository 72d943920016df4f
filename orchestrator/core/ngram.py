"""The in-process branch source: what followed the last time the text ended like this (prompt lookup).

Needs no worker, so it survives all of them. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST = 5
SHORTEST = 2


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that followed before on the text's last `matched` tokens; the more matched, the likelier they hold."""

    chain: tuple[int, ...] = ()
    matched: int = 0


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

    def lookup(self, length: int, then: Sequence[int] = ()) -> Copy:
        """`length` tokens that followed the longest known suffix of the text, as if it went on with `then`.

        What is copied may run into its own beginning: a text that repeats itself goes on repeating.
        """
        tail = [*self._tokens[-LONGEST:], *then][-LONGEST:]
        for n in range(len(tail), SHORTEST - 1, -1):
            at = self._followed_at.get(tuple(tail[-n:]))
            if at is not None:
                return Copy(self._copied(at, max(length, 0), then), n)
        return Copy()

    def _copied(self, at: int, length: int, then: Sequence[int]) -> tuple[int, ...]:
        copied = self._tokens[at : at + length]
        if len(copied) < length:
            copied += then
        for index in range(length - len(copied)):
            copied.append(copied[index])
        return tuple(copied[:length])
