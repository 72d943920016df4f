"""The gate: which engine a request goes to, as Ray Serve 2.60 chooses, and the line of those that none takes.

*Power of two choices* (`pow_2_router.py`): of two engines drawn by chance that one with fewer requests, if it takes
any more; else again after a backoff. *Sessions* (`consistent_hash_router.py`): the engine that the session's hash falls
to on a ring, else the two behind it, else again after a backoff. Who was broken off comes before all that wait.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial

from tests.harness.virtual.world import World
from tools.fleet.engine import Engine
from tools.fleet.job import Job

FIRST_BACKOFF, LAST_BACKOFF = 0.025, 0.5
VIRTUAL_NODES, FALLBACKS = 100, 2
TASKS = 2  # for each engine, at most


class PowerOfTwo:
    """`in_order`: whoever finds a place, the first of the line has it."""

    in_order = True

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"gate {seed}")

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        two = self._rng.sample(engines, min(2, len(engines)))
        return sorted(two, key=lambda engine: engine.load)


class Least:
    """Where the least is under way, as Outrider's own gate has it for requests without a session."""

    in_order = True

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        return [min(engines, key=lambda engine: engine.load)]


class Sessions:
    """Each waits for its own engines."""

    in_order = False

    def __init__(self) -> None:
        self._ring: list[tuple[int, Engine]] = []
        self._of: Sequence[Engine] = ()

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        if list(engines) != list(self._of):
            self._of = tuple(engines)
            nodes = ((_hash(f"{engine.number}:{n}"), engine) for engine in engines for n in range(VIRTUAL_NODES))
            self._ring = sorted(nodes, key=lambda node: node[0])
        place = bisect_right(self._ring, _hash(job.session), key=lambda node: node[0])
        around = (engine for _, engine in self._ring[place:] + self._ring[:place])
        return list(dict.fromkeys(around))[: 1 + FALLBACKS]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


Router = PowerOfTwo | Least | Sessions


class Gate:
    """Hands each engine `ongoing` requests at the most."""

    def __init__(self, world: World, router: Router, ongoing: int) -> None:
        self.engines: list[Engine] = []
        self._world, self._router, self._ongoing = world, router, ongoing
        self._line: deque[Job] = deque()
        self._tasks = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    def take(self, job: Job) -> None:
        if job.is_resumed:
            self._line.appendleft(job)
        else:
            self._line.append(job)
        if not self._router.in_order or self._tasks < TASKS * len(self.engines):
            self._tasks += 1
            self._try(job, FIRST_BACKOFF)

    def _try(self, of: Job, backoff: float) -> None:
        """One task: in order it finds places for whoever is first until nobody waits, else for one request."""
        while self._line and (self._router.in_order or of in self._line):
            job = self._line[0] if self._router.in_order else of
            if not self._place(job):
                self._world.after(backoff, partial(self._try, of, min(2 * backoff, LAST_BACKOFF)))
                return
            backoff = FIRST_BACKOFF
        self._tasks -= 1

    def _place(self, job: Job) -> bool:
        known = [engine for engine in self.engines if engine.known]
        for engine in self._router.candidates(job, known) if known else ():
            if engine.load < self._ongoing:
                self._line.remove(job)
                engine.take(job)
                return True
        return False
