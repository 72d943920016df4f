"""How long something took, counted in fixed buckets: cheap enough to be done every round."""

from __future__ import annotations

from bisect import bisect_left

from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.tallies import Durations

BOUNDS_MS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
_BOUNDS_NS = tuple(int(bound * MILLISECOND_NS) for bound in BOUNDS_MS)
_SECOND_NS = 1000 * MILLISECOND_NS


class Stopwatch:
    """Counts on one thread; any other may ask for what was counted, and misses the newest at worst."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._nanoseconds = 0

    def add(self, nanoseconds: int) -> None:
        self._counts[bisect_left(_BOUNDS_NS, nanoseconds)] += 1
        self._nanoseconds += nanoseconds

    def told(self) -> Durations:
        """All of it, in seconds."""
        bounds = tuple(bound / 1000 for bound in BOUNDS_MS)
        return Durations(bounds, tuple(self._counts), self._nanoseconds / _SECOND_NS)
