"""How long a drafter's operations take of late, so that whoever watches it knows how long the next should take."""

from __future__ import annotations

from enum import Enum

FADE = 0.95


class Operation(Enum):
    """What a drafter does without a look at its link."""

    READ = "a piece of a prompt"
    GROW = "a forward of its trees"
    CHAIN = "a chain that is waited for"


class Usual:
    """The longest of each, fading."""

    def __init__(self) -> None:
        self._ms: dict[Operation, float] = {}

    def took(self, operation: Operation, milliseconds: float) -> None:
        self._ms[operation] = max(milliseconds, FADE * self._ms.get(operation, 0.0))

    def expected_ms(self, *operations: Operation) -> float:
        """These, one after the other; 0: one of them was never made."""
        known = [self._ms.get(operation, 0.0) for operation in operations]
        return sum(known) if all(known) else 0.0
