"""How many engines: Ray Serve's rule, by how many requests run or wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from tests.harness.virtual.world import World
from tools.fleet.plan import Scaling

# Looks this often, at the mean of what was in so many looks.
EVERY, LOOKS = 1.0, 30


class Scaler:
    """`counts` tells engines and requests; `grow` and `shrink` are asked for one engine more or less."""

    def __init__(
        self,
        scaling: Scaling,
        world: World,
        counts: Callable[[], tuple[int, int]],
        grow: Callable[[], None],
        shrink: Callable[[], None],
    ) -> None:
        self._scaling, self._world = scaling, world
        self._counts, self._grow, self._shrink = counts, grow, shrink
        self._seen: deque[int] = deque(maxlen=LOOKS)
        self._coming, self._since, self._wish = 0, 0.0, 0
        world.after(EVERY, self._look)

    def _look(self) -> None:
        engines, requests = self._counts()
        self._seen.append(requests)
        self._decide(engines + self._coming)
        self._world.after(EVERY, self._look)

    def _decide(self, engines: int) -> None:
        scaling, now = self._scaling, self._world.now
        wanted = math.ceil(sum(self._seen) / len(self._seen) / scaling.each)
        wanted = min(max(wanted, scaling.least), scaling.most)
        wish = (wanted > engines) - (wanted < engines)
        if wish != self._wish:
            self._wish, self._since = wish, now
        if wish > 0 and now - self._since >= scaling.up:
            self._coming += wanted - engines
            for _ in range(wanted - engines):
                self._world.after(scaling.start, self._started)
            self._wish = 0
        elif wish < 0 and now - self._since >= scaling.down:
            for _ in range(engines - wanted):
                self._shrink()
            self._wish = 0

    def _started(self) -> None:
        self._coming -= 1
        self._grow()
