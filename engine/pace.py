"""Standing in for a machine that is not here: each forward takes as long as a latency profile says.

A worker with a pace does its real work, then sleeps until the profile's time for that many rows has passed, so that a
sleeping process stands for a remote accelerator. Work slower than the profile fails the run: nothing is pretended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.errors import WorkerError
from protocol.profile import Latency

# A simulated forward may end this much late before it counts as failed: the system's own jitter.
SLACK_SECONDS = 0.002
# The system's sleep overshoots; the last stretch is waited for awake.
AWAKE_SECONDS = 0.0002


def sleep(seconds: float) -> None:
    """`time.sleep` that ends on time, within microseconds on an idle core."""
    end = time.perf_counter() + seconds
    if seconds > AWAKE_SECONDS:
        time.sleep(seconds - AWAKE_SECONDS)
    while time.perf_counter() < end:
        pass


class Pace:
    """Holds a worker to a latency. `begin` before a forward is built, `end` after it with its rows, `wait` when its
    result has been read; `nap(seconds)` is how it waits, `clock` tells seconds.
    """

    def __init__(
        self,
        latency: Latency,
        nap: Callable[[float], None] = sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._latency = latency
        self._nap = nap
        self._clock = clock
        self._due: float | None = None

    def begin(self) -> None:
        now = self._clock()
        self._due = now if self._due is None else max(self._due, now)

    def end(self, rows: int) -> None:
        self._due = (self._clock() if self._due is None else self._due) + self._latency.milliseconds(rows) / 1000

    def wait(self) -> None:
        """Sleeps until all forwards since are due.

        Raises:
            WorkerError: the real work ended after the profile's machine would have.
        """
        if self._due is None:
            return
        left, self._due = self._due - self._clock(), None
        if left < -SLACK_SECONDS:
            raise WorkerError(
                f"the simulation failed: the real forward ended {-left * 1000:.1f} ms after the simulated one would"
                " have; use a smaller model, a slower profile or an idle machine"
            )
        if left > 0:
            self._nap(left)
