"""The time that forwards take on a simulated machine, as a latency profile prescribes.

A worker with a `Pace` simulates another machine. It does its real work, then sleeps until the profile's time for that
many rows has passed, so that a sleeping process stands for a remote accelerator. Work that takes longer than the
profile says makes the times wrong, never a text. A short delay is tolerated; more than a thirtieth of the time is
reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tools.latency import Latency
from tools.simulation.profile import TIMES_NOT_KEPT

log = logging.getLogger(__name__)

# Forwards may be late by this much in total, plus this share of the simulated time.
MAX_LATE_SECONDS = 0.020
MAX_LATE_RATIO = 0.03
# The system's sleep takes too long, so the end of a wait is a busy wait.
BUSY_WAIT_SECONDS = 0.0002


def sleep_precisely(seconds: float) -> None:
    """Sleeps like `time.sleep`, but ends on time, within microseconds on an idle core."""
    end = time.perf_counter() + seconds
    if seconds > BUSY_WAIT_SECONDS:
        time.sleep(seconds - BUSY_WAIT_SECONDS)
    while time.perf_counter() < end:
        pass


class Pace:
    """Makes forwards take a profile's `latency`.

    Call `end` after a forward was built, and `wait` when its result has been read. `sleep(seconds)` waits, `clock()`
    returns seconds, `on_late` is called when the real work takes longer than the profile.
    """

    def __init__(
        self,
        latency: Latency,
        sleep: Callable[[float], None] = sleep_precisely,
        clock: Callable[[], float] = time.perf_counter,
        on_late: Callable[[str], None] = log.warning,
    ) -> None:
        self._latency = latency
        self._sleep = sleep
        self._clock = clock
        self._on_late = on_late
        self._busy_until = 0.0
        self._pending = False
        self._simulated = 0.0
        self._late = 0.0

    def end(self, rows: int, ready: float) -> None:
        """Ends a forward of `rows` that began at `ready`, when its input was available, or after the one before it.

        So the host's work between two forwards counts for the second one, as in times that are measured step by step.
        """
        seconds = self._latency(rows) / 1000
        self._busy_until = max(self._busy_until, ready) + seconds
        self._simulated += seconds
        self._pending = True

    def wait(self) -> None:
        """Sleeps until all forwards have ended."""
        if not self._pending:
            return
        self._pending = False
        now = self._clock()
        if now < self._busy_until:
            self._sleep(self._busy_until - now)
            return
        self._late += now - self._busy_until
        self._busy_until = now
        if self._late > MAX_LATE_SECONDS + MAX_LATE_RATIO * self._simulated:
            self._on_late(
                f"{TIMES_NOT_KEPT}: forwards ended {self._late * 1000:.0f} ms late in {self._simulated * 1000:.0f} ms"
                " of simulated time; use a smaller model, a slower profile or an idle machine"
            )
            self._late = self._simulated = 0.0
