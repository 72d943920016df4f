"""The speculation cache of one request: outcome -> branch, one round deep (paper definition 4).

Holds only what arrived before the outcome was handled, so a hit is a prediction, never a look at the answer.
"""

from __future__ import annotations

from protocol.messages import Branches

Outcome = tuple[int, int]


class SpeculationCache:
    """The branches of the round under verification; `start` empties it for the next one."""

    def __init__(self) -> None:
        self._branches: dict[Outcome, tuple[int, ...]] = {}
        self.final = False

    def start(self) -> None:
        self._branches.clear()
        self.final = False

    def add(self, message: Branches) -> None:
        """Takes in branches; a deeper one replaces its shorter beginning."""
        for entry in message.entries:
            known = self._branches.get((entry.accepted, entry.bonus), ())
            if len(entry.chain) > len(known):
                self._branches[entry.accepted, entry.bonus] = entry.chain
        self.final = self.final or message.final

    def lookup(self, accepted: int, bonus: int) -> tuple[int, ...] | None:
        """The chain prepared for this outcome, as deep as it has come, or None."""
        return self._branches.get((accepted, bonus))

    def __len__(self) -> int:
        return len(self._branches)
