"""Estimates the time of a forward from its number of rows, by measurements."""

from __future__ import annotations

DECAY = 0.95  # the weight of a measurement relative to the next one
# A lower bound of the time of a row, as a share of the mean time per row, since measurements are noisy.
MIN_ROW_SHARE = 0.1
MAX_STALL_FACTOR = 4.0  # a measurement counts as at most so many average ones: a suspended computer makes none longer


class ForwardCost:
    """Milliseconds of a forward by its rows: a line fitted to measurements, whose weights decay with age.

    `seen`: the total weight of the measurements.
    """

    def __init__(self) -> None:
        self.seen = 0.0
        self._rows = self._ms = self._rows_rows = self._rows_ms = 0.0

    def add(self, rows: float, ms: float) -> None:
        """Records that a forward of `rows` took `ms`."""
        if self._ms:
            ms = min(ms, MAX_STALL_FACTOR * self(max(rows, self._rows / self.seen)))
        self.seen = self.seen * DECAY + 1.0
        self._rows = self._rows * DECAY + rows
        self._ms = self._ms * DECAY + ms
        self._rows_rows = self._rows_rows * DECAY + rows * rows
        self._rows_ms = self._rows_ms * DECAY + rows * ms

    @property
    def line(self) -> tuple[float, float]:
        """The fixed milliseconds of a forward, and those of each row. There must be a measurement."""
        rows, ms = self._rows / self.seen, self._ms / self.seen
        spread = self._rows_rows / self.seen - rows * rows
        if spread < 0.01 * rows * rows:  # all forwards had about the same rows
            return 0.0, ms / rows
        slope = (self._rows_ms / self.seen - rows * ms) / spread
        each = min(max(slope, MIN_ROW_SHARE * ms / rows), ms / rows)  # so that neither is negative
        return ms - each * rows, each

    def __call__(self, rows: float) -> float:
        """Returns the milliseconds of a forward of `rows`; 0 before the first measurement."""
        if not self.seen:
            return 0.0
        fixed, each = self.line
        return fixed + each * rows
