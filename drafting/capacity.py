"""How many branches can be ready when the target is: what a forward takes by its rows, against how long a round is.

Counts and times only; knows nothing of what is drafted. Old measurements fade.
"""

from __future__ import annotations

FADE = 0.95
# Until so much has been seen nothing is said.
ENOUGH = 8.0


class Capacity:
    """Live estimates of one drafter beside its target."""

    def __init__(self) -> None:
        self._forwards = self._rows = self._ms = self._rows_rows = self._rows_ms = 0.0
        self._rounds = self._round_ms = 0.0

    def forward(self, rows: int, ms: float) -> None:
        """A forward of so many tokens took `ms`."""
        self._forwards = self._forwards * FADE + 1.0
        self._rows = self._rows * FADE + rows
        self._ms = self._ms * FADE + ms
        self._rows_rows = self._rows_rows * FADE + rows * rows
        self._rows_ms = self._rows_ms * FADE + rows * ms

    def round(self, ms: float) -> None:
        """From one commit of a request, with a chain to verify, to the next it took `ms`."""
        self._rounds = self._rounds * FADE + 1.0
        self._round_ms = self._round_ms * FADE + ms

    def branches(self, depth: int) -> int | None:
        """How many branches of this depth can grow while a round lasts, all requests' together; None: not known yet.

        Their forwards are one more than they are deep: those of full acceptance begin with the second.
        """
        if min(self._rounds, self._forwards) < ENOUGH:
            return None
        fixed, each = self._cost()
        room = self._round_ms / self._rounds / (depth + 1) - fixed
        return max(int(room / each), 0)

    def _cost(self) -> tuple[float, float]:
        """Milliseconds of a forward, and of each of its rows: the straight line through what was seen."""
        rows, ms = self._rows / self._forwards, self._ms / self._forwards
        spread = self._rows_rows / self._forwards - rows * rows
        if spread < 0.01 * rows * rows:  # they were all alike
            return 0.0, ms / rows
        slope = (self._rows_ms / self._forwards - rows * ms) / spread
        each = min(max(slope, 0.1 * ms / rows), ms / rows)  # neither may be negative, whatever the noise
        return ms - each * rows, each
