"""The ingress: chooses an engine for each request, as Ray Serve 2.60 does, and queues requests that no engine takes.

*Power of two choices* (`pow_2_router.py`): the less loaded of two random engines, if it takes more requests; else again
after a backoff. *Sessions* (`consistent_hash_router.py`): the engine at the session's hash on a ring, else the next two
engines, else again after a backoff. Interrupted requests come before all waiting ones.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial

from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.engine import Engine
from tools.fleet.job import Job

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.025, 0.5
VIRTUAL_NODES, FALLBACKS = 100, 2
MAX_TASKS_PER_ENGINE = 2  # at most, per engine


class PowerOfTwo:
    """Chooses between two random engines. `in_order`: a free slot goes to the first request of the queue."""

    in_order = True

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"ingress {seed}")

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        two = self._rng.sample(engines, min(2, len(engines)))
        return sorted(two, key=lambda engine: engine.load)


class LeastLoaded:
    """Chooses the engine with the fewest requests, as Outrider's ingress does for requests without a session."""

    in_order = True

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        return [min(engines, key=lambda engine: engine.load)]


class Sessions:
    """Chooses engines by session. Each request waits for the engines of its session."""

    in_order = False

    def __init__(self) -> None:
        self._ring: list[tuple[int, Engine]] = []
        self._ring_engines: Sequence[Engine] = ()

    def candidates(self, job: Job, engines: Sequence[Engine]) -> list[Engine]:
        if list(engines) != list(self._ring_engines):
            self._ring_engines = tuple(engines)
            nodes = ((_hash(f"{engine.number}:{n}"), engine) for engine in engines for n in range(VIRTUAL_NODES))
            self._ring = sorted(nodes, key=lambda node: node[0])
        start = bisect_right(self._ring, _hash(job.session), key=lambda node: node[0])
        following = (engine for _, engine in self._ring[start:] + self._ring[:start])
        return list(dict.fromkeys(following))[: 1 + FALLBACKS]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


Router = PowerOfTwo | LeastLoaded | Sessions


class IngressQueue:
    """Routes requests to `engines`, with at most `ongoing` requests per engine."""

    def __init__(self, loop: EventLoop, router: Router, ongoing: int) -> None:
        self.engines: list[Engine] = []
        self._loop, self._router, self._ongoing = loop, router, ongoing
        self._queue: deque[Job] = deque()
        self._tasks = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def take(self, job: Job) -> None:
        if job.is_resumed:
            self._queue.appendleft(job)
        else:
            self._queue.append(job)
        if not self._router.in_order or self._tasks < MAX_TASKS_PER_ENGINE * len(self.engines):
            self._tasks += 1
            self._run_task(job, MIN_BACKOFF_SECONDS)

    def _run_task(self, of: Job, backoff: float) -> None:
        """Runs one routing task: in order, it assigns the first request until the queue is empty; else the one `of`."""
        while self._queue and (self._router.in_order or of in self._queue):
            job = self._queue[0] if self._router.in_order else of
            if not self._assign(job):
                self._loop.call_later(backoff, partial(self._run_task, of, min(2 * backoff, MAX_BACKOFF_SECONDS)))
                return
            backoff = MIN_BACKOFF_SECONDS
        self._tasks -= 1

    def _assign(self, job: Job) -> bool:
        known = [engine for engine in self.engines if engine.is_routable]
        for engine in self._router.candidates(job, known) if known else ():
            if engine.load < self._ongoing:
                self._queue.remove(job)
                engine.take(job)
                return True
        return False
