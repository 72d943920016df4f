"""The in-process source of copies: what followed the last time the text ended like this (prompt lookup).

Needs no worker, so no loss of one affects it. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LONGEST = 5
SHORTEST = 2
# The core looks through so many tokens at a time, well under a millisecond, and keeps as many in mind, some 15 MiB.
PIECE = 256
WINDOW = 1 << 15


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that followed before on the text's last `matched` tokens; the more matched, the likelier they hold."""

    chain: tuple[int, ...] = ()
    matched: int = 0


class NgramIndex:
    """The n-grams of the last `WINDOW` tokens of one request's text, each with where it was last followed by something.

    Tokens are taken at once and looked through when there is time: until then what they say is not found.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._read = 0
        self.extend(tokens)
        self.read_on(len(self._tokens))

    @property
    def is_empty(self) -> bool:
        """Whether it was never given a token: nothing is to be found."""
        return not self._tokens

    @property
    def is_behind(self) -> bool:
        """Whether there are tokens to look through."""
        return self._read < len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes more text; what is behind anyway is not read here."""
        behind = self.is_behind
        self._tokens += tokens
        if not behind:
            self.read_on(PIECE)

    def read_on(self, count: int) -> None:
        """Looks through up to `count` tokens more."""
        if not self._read:
            self._read = max(len(self._tokens) - WINDOW, 0)
        for end in range(self._read, min(self._read + count, len(self._tokens))):
            self._forget(end - WINDOW)
            for gram in self._ending_at(end):
                self._followed_at[gram] = end
            self._read = end + 1

    def _ending_at(self, end: int) -> Iterator[tuple[int, ...]]:
        """The n-grams that the token at `end` follows."""
        return (tuple(self._tokens[end - n : end]) for n in range(SHORTEST, min(LONGEST, end) + 1))

    def _forget(self, end: int) -> None:
        """Drops what was last followed by the token there, if any."""
        for gram in self._ending_at(end):
            if self._followed_at.get(gram) == end:
                del self._followed_at[gram]

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
