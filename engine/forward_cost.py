"""What a forward takes by its rows: the straight line through what was measured, in milliseconds; old ones fade."""

from __future__ import annotations

FADE = 0.95
# A row takes at least this share of what a row of the mean forward does, whatever the noise.
LEAST_SHARE = 0.1


class ForwardCost:
    """Learned as forwards come; `seen` says how many still count."""

    def __init__(self) -> None:
        self.seen = 0.0
        self._rows = self._ms = self._rows_rows = self._rows_ms = 0.0

    def add(self, rows: int, ms: float) -> None:
        """A forward of so many tokens took `ms`."""
        self.seen = self.seen * FADE + 1.0
        self._rows = self._rows * FADE + rows
        self._ms = self._ms * FADE + ms
        self._rows_rows = self._rows_rows * FADE + rows * rows
        self._rows_ms = self._rows_ms * FADE + rows * ms

    @property
    def line(self) -> tuple[float, float]:
        """Milliseconds of a forward, and of each of its rows. Something must have been seen."""
        rows, ms = self._rows / self.seen, self._ms / self.seen
        spread = self._rows_rows / self.seen - rows * rows
        if spread < 0.01 * rows * rows:  # they were all alike
            return 0.0, ms / rows
        slope = (self._rows_ms / self.seen - rows * ms) / spread
        each = min(max(slope, LEAST_SHARE * ms / rows), ms / rows)  # neither may be negative, whatever the noise
        return ms - each * rows, each

    def __call__(self, rows: int) -> float:
        """What so many rows take; 0: nothing was seen yet."""
        if not self.seen:
            return 0.0
        fixed, each = self.line
        return fixed + each * rows
