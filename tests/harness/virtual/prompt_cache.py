"""The prompt cache of a simulated target, which evicts the least recently used text first.

Texts with the same first tokens count as one text that has grown, like those of a session.
"""

from __future__ import annotations

from collections import OrderedDict

PREFIX_TOKENS = 16


class VirtualPromptCache:
    """A cache for `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lengths: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._tokens = 0

    def lookup(self, tokens: tuple[int, ...]) -> int:
        """Returns how many of the first tokens are cached, at most all but the last one."""
        known = self._lengths.get(tokens[:PREFIX_TOKENS], 0)
        return max(min(known, len(tokens) - 1), 0)

    def add(self, tokens: tuple[int, ...]) -> None:
        """Adds the tokens of a text."""
        if len(tokens) < PREFIX_TOKENS:
            return
        self._tokens += len(tokens) - self._lengths.pop(tokens[:PREFIX_TOKENS], 0)
        self._lengths[tokens[:PREFIX_TOKENS]] = len(tokens)
        while self._tokens > self._limit:
            self._tokens -= self._lengths.popitem(last=False)[1]
