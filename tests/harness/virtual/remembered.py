"""The prompt cache of a virtual target, with the least recently used text dropped first.

Texts with the same beginning count as one text that grew, like those of a session.
"""

from __future__ import annotations

from collections import OrderedDict

BEGINNING = 16


class Remembered:
    """A cache for `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._tokens = 0

    def find(self, tokens: tuple[int, ...]) -> int:
        """Returns how many of the first tokens need not be read; the last token is always read."""
        known = self._known.get(tokens[:BEGINNING], 0)
        return max(min(known, len(tokens) - 1), 0)

    def keep(self, tokens: tuple[int, ...]) -> None:
        """Adds the tokens of a text."""
        if len(tokens) < BEGINNING:
            return
        self._tokens += len(tokens) - self._known.pop(tokens[:BEGINNING], 0)
        self._known[tokens[:BEGINNING]] = len(tokens)
        while self._tokens > self._limit:
            self._tokens -= self._known.popitem(last=False)[1]
