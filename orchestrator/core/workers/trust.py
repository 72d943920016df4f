"""How often one worker has said what cannot be, by kind, and when that is too often.

An honest worker says no such thing, however late its words come, so few are enough. Knows counts and words only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from outrider.protocol.tallies import Tally

MOST_LIES = 8


class Trust:
    """One worker's."""

    def __init__(self) -> None:
        self._lies: Counter[str] = Counter()

    @property
    def is_lost(self) -> bool:
        return self._lies.total() >= MOST_LIES

    def lied(self, kind: str) -> None:
        self._lies[kind] += 1

    def tallies(self) -> tuple[Tally, ...]:
        """How often it lied, by kind."""
        return tuple(Tally(kind, count) for kind, count in sorted(self._lies.items()))

    def told(self, words: Mapping[str, str]) -> str:
        """What it said, for a person; `words` for each kind."""
        return ", ".join(f"{words.get(kind, kind)} ({count})" for kind, count in sorted(self._lies.items()))
