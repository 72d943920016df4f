"""Scales a fleet's engines by Ray Serve's rule, from the number of running and waiting requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.plan import Scaling

# Seconds between two samples, and the number of samples in the mean.
SAMPLE_SECONDS, MEAN_SAMPLES = 1.0, 30


class Scaler:
    """`counts` returns the numbers of engines and requests; `grow` and `shrink` add and remove one engine."""

    def __init__(
        self,
        scaling: Scaling,
        loop: EventLoop,
        counts: Callable[[], tuple[int, int]],
        grow: Callable[[], None],
        shrink: Callable[[], None],
    ) -> None:
        self._scaling, self._loop = scaling, loop
        self._counts, self._grow, self._shrink = counts, grow, shrink
        self._seen: deque[int] = deque(maxlen=MEAN_SAMPLES)
        self._coming, self._since, self._wish = 0, 0.0, 0
        loop.call_later(SAMPLE_SECONDS, self._sample)

    def _sample(self) -> None:
        engines, requests = self._counts()
        self._seen.append(requests)
        self._decide(engines + self._coming)
        self._loop.call_later(SAMPLE_SECONDS, self._sample)

    def _decide(self, engines: int) -> None:
        scaling, now = self._scaling, self._loop.now
        wanted = math.ceil(sum(self._seen) / len(self._seen) / scaling.each)
        wanted = min(max(wanted, scaling.least), scaling.most)
        wish = (wanted > engines) - (wanted < engines)
        if wish != self._wish:
            self._wish, self._since = wish, now
        if wish > 0 and now - self._since >= scaling.up:
            self._coming += wanted - engines
            for _ in range(wanted - engines):
                self._loop.call_later(scaling.start, self._started)
            self._wish = 0
        elif wish < 0 and now - self._since >= scaling.down:
            for _ in range(engines - wanted):
                self._shrink()
            self._wish = 0

    def _started(self) -> None:
        self._coming -= 1
        self._grow()
