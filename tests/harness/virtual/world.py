"""Virtual time: a clock that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.protocol import clock


class World:
    """An event queue. Of simultaneous events those not marked `last` come first, like BRANCHES before OUTCOMEs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._serial = 0

    @property
    def idle(self) -> bool:
        return not self._events

    def now_ns(self) -> int:
        return round(self.now * 1e9)

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, happen: Callable[[], None], last: bool = False) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + seconds, int(last), self._serial, happen))

    def at(self, second: float, happen: Callable[[], None]) -> None:
        self.after(second - self.now, happen)

    def step(self) -> None:
        """Runs the next event."""
        self.now, _, _, happen = heapq.heappop(self._events)
        happen()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replaces the processes' clock by this one within the block."""
        real, clock.now = clock.now, self.now_ns
        try:
            yield
        finally:
            clock.now = real
