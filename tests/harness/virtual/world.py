"""Virtual time: seconds that pass by jumps, and what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.protocol import clock


class World:
    """Of two things at once those that are not `last` come first, as the core takes BRANCHES before OUTCOMEs."""

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
        """Goes on to the next thing that happens."""
        self.now, _, _, happen = heapq.heappop(self._events)
        happen()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile the processes' clock is this one."""
        real, clock.now = clock.now, self.now_ns
        try:
            yield
        finally:
            clock.now = real
