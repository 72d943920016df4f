"""A time to keep to: loops that end early when their share of it is over, so that a slow machine is measured less often
and not for longer."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.protocol import clock


class Hourglass:
    """Runs from its making on. Shares are of the whole time and count from its beginning."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started_ns = clock.now()

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over; below zero afterwards."""
        return share * self._seconds - (clock.now() - self._started_ns) / 1e9

    def turns(self, most: int, least: int, share: float) -> Iterator[int]:
        """0, 1, ... up to `most` of them; beyond `least` only while this share of the time is not over."""
        for number in range(most):
            if number >= least and self.left(share) <= 0:
                return
            yield number
