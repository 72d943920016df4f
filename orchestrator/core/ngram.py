"""N-gram copies of the text: the tokens that followed the last time the text ended like this (prompt lookup).

Needs no worker, so the loss of one does not affect it. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LONGEST = 5
SHORTEST = 2
# The core indexes PIECE tokens at a time, well under a millisecond, and keeps the last WINDOW, some 15 MiB.
PIECE = 256
WINDOW = 1 << 15


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that followed the text's last `matched` tokens before; the longer the match, the likelier they recur."""

    chain: tuple[int, ...] = ()
    matched: int = 0


class NgramIndex:
    """The n-grams of the last `WINDOW` tokens of one request's text, with the position after their last occurrence.

    Tokens are appended at once and indexed when there is time; until then a lookup does not find them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._read = 0
        self.extend(tokens)
        self.read_on(len(self._tokens))

    @property
    def is_empty(self) -> bool:
        """Whether it has no tokens."""
        return not self._tokens

    @property
    def is_behind(self) -> bool:
        """Whether there are tokens to index."""
        return self._read < len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, and indexes them unless earlier ones are still to be indexed."""
        behind = self.is_behind
        self._tokens += tokens
        if not behind:
            self.read_on(PIECE)

    def read_on(self, count: int) -> None:
        """Indexes up to `count` more tokens."""
        if not self._read:
            self._read = max(len(self._tokens) - WINDOW, 0)
        for end in range(self._read, min(self._read + count, len(self._tokens))):
            self._forget(end - WINDOW)
            for gram in self._ending_at(end):
                self._followed_at[gram] = end
            self._read = end + 1

    def _ending_at(self, end: int) -> Iterator[tuple[int, ...]]:
        """Returns the n-grams before the token at `end`."""
        return (tuple(self._tokens[end - n : end]) for n in range(SHORTEST, min(LONGEST, end) + 1))

    def _forget(self, end: int) -> None:
        """Drops the n-grams whose last occurrence is before the token at `end`."""
        for gram in self._ending_at(end):
            if self._followed_at.get(gram) == end:
                del self._followed_at[gram]

    def lookup(self, length: int, then: Sequence[int] = ()) -> Copy:
        """Returns `length` tokens that followed the longest known suffix of the text, extended by `then`.

        A copy may continue with its own beginning: a text that repeats itself continues to repeat.
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
