"""How many branches can be ready when the target is: what a forward takes by its rows, against how long a round is.

Counts and times only; knows nothing of what is drafted. Old measurements fade.
"""

from __future__ import annotations

from outrider.engine.forward_cost import FADE, ForwardCost

# Until so much has been seen nothing is said.
ENOUGH = 8.0


class Capacity:
    """Live estimates of one drafter beside its target."""

    def __init__(self) -> None:
        self._cost = ForwardCost()
        self._rounds = self._round_ms = 0.0

    def forward(self, rows: int, ms: float) -> None:
        """A forward of so many tokens took `ms`."""
        self._cost.add(rows, ms)

    def round(self, ms: float) -> None:
        """From one commit of a request, with a chain to verify, to the next it took `ms`."""
        self._rounds = self._rounds * FADE + 1.0
        self._round_ms = self._round_ms * FADE + ms

    def branches(self, depth: int) -> int | None:
        """How many branches of this depth can grow while a round lasts, all requests' together; None: not known yet.

        Their forwards are one more than they are deep: those of full acceptance begin with the second.
        """
        if min(self._rounds, self._cost.seen) < ENOUGH:
            return None
        fixed, each = self._cost.line
        room = self._round_ms / self._rounds / (depth + 1) - fixed
        return max(int(room / each), 0)
