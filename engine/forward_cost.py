"""The time that forwards take by their rows, as measured."""

from __future__ import annotations

FADE = 0.95
# A row takes at least this share of a row's time in the mean forward, whatever the noise.
LEAST_SHARE = 0.1


class ForwardCost:
    """Milliseconds of a forward by its rows: a straight line through measurements, of which old ones fade.

    `seen`: the total weight of the measurements.
    """

    def __init__(self) -> None:
        self.seen = 0.0
        self._rows = self._ms = self._rows_rows = self._rows_ms = 0.0

    def add(self, rows: int, ms: float) -> None:
        """Records that a forward of `rows` took `ms`."""
        self.seen = self.seen * FADE + 1.0
        self._rows = self._rows * FADE + rows
        self._ms = self._ms * FADE + ms
        self._rows_rows = self._rows_rows * FADE + rows * rows
        self._rows_ms = self._rows_ms * FADE + rows * ms

    @property
    def line(self) -> tuple[float, float]:
        """The milliseconds of a forward and of each of its rows, after the first measurement."""
        rows, ms = self._rows / self.seen, self._ms / self.seen
        spread = self._rows_rows / self.seen - rows * rows
        if spread < 0.01 * rows * rows:  # all forwards had about the same rows
            return 0.0, ms / rows
        slope = (self._rows_ms / self.seen - rows * ms) / spread
        each = min(max(slope, LEAST_SHARE * ms / rows), ms / rows)  # so that neither is negative
        return ms - each * rows, each

    def __call__(self, rows: int) -> float:
        """Returns the milliseconds of a forward of `rows`; 0 before the first measurement."""
        if not self.seen:
            return 0.0
        fixed, each = self.line
        return fixed + each * rows
