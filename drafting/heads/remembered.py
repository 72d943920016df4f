"""What a head has read of a text, for later texts that begin like it.

Pair j is made of tokens j and j + 1, so of so many tokens that two texts share one pair fewer serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.prompt_cache import LEAST, Saved, Start


@dataclass(frozen=True, slots=True)
class SavedPairs(Saved):
    """`length` counts tokens. `layers` hold the pairs from `begin` on: what came before was never heard."""

    begin: int = 0

    def serves(self, length: int) -> int:
        shared = min(length, self.length)
        return shared if shared - 1 - self.begin >= LEAST else 0

    def up_to(self, position: int) -> Start:
        """The pairs before this position, as the head's own texts begin with them."""
        count = position - self.begin
        return Start(Saved(count, tuple(self.columns(count))), count)
