"""What a virtual target remembers of texts: their first tokens, the least recently used forgotten first.

Texts with the same beginning are taken for one text that grew, as a session's are.
"""

from __future__ import annotations

from collections import OrderedDict

BEGINNING = 16


class Remembered:
    """Room for `limit` tokens altogether."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._tokens = 0

    def find(self, tokens: tuple[int, ...]) -> int:
        """How many of the first tokens need not be read; the last one always is."""
        known = self._known.get(tokens[:BEGINNING], 0)
        return max(min(known, len(tokens) - 1), 0)

    def keep(self, tokens: tuple[int, ...]) -> None:
        """So many of a text have been read or made."""
        if len(tokens) < BEGINNING:
            return
        self._tokens += len(tokens) - self._known.pop(tokens[:BEGINNING], 0)
        self._known[tokens[:BEGINNING]] = len(tokens)
        while self._tokens > self._limit:
            self._tokens -= self._known.popitem(last=False)[1]
