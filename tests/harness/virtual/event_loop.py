"""Virtual time: a clock that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.protocol import clock


class EventLoop:
    """A queue of callbacks by their virtual time, named like asyncio's loop.

    Of callbacks at the same time, those marked `last` run after the others, like OUTCOMEs after BRANCHES.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._serial = 0

    @property
    def idle(self) -> bool:
        return not self._queue

    def now_ns(self) -> int:
        return round(self.now * 1e9)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None], last: bool = False) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (self.now + seconds, int(last), self._serial, callback))

    def call_at(self, second: float, callback: Callable[[], None]) -> None:
        self.call_later(second - self.now, callback)

    def run_next(self) -> None:
        """Runs the next callback at its time."""
        self.now, _, _, callback = heapq.heappop(self._queue)
        callback()

    @contextmanager
    def as_process_clock(self) -> Iterator[None]:
        """Replaces `outrider.protocol.clock.now` by the virtual time within the block."""
        real, clock.now = clock.now, self.now_ns
        try:
            yield
        finally:
            clock.now = real
