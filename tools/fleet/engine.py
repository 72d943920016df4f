"""An engine as the gate sees it, whatever makes its tokens: a line of requests, and places for those that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.orchestrator.front.admission import FairQueue
from tests.harness.virtual.world import World
from tools.fleet.job import Job


class Machinery(Protocol):
    """What makes an engine's tokens."""

    @property
    def busy(self) -> float:
        """Seconds in which its target worked."""
        ...

    def begin(self, job: Job) -> None: ...

    def end(self) -> None: ...

    def lose_drafters(self, count: int, noticed: float) -> None: ...

    def regain_drafters(self) -> None: ...


class Engine:
    """`number` and `zone` say which; `ended` hears of each request that is complete. `gone`: nothing runs on any more.
    `known`: the gate may choose it."""

    def __init__(self, number: int, zone: int, places: int, world: World, ended: Callable[[Job], None]) -> None:
        self.number, self.zone = number, zone
        self.gone, self.known = False, True
        self.since, self.until = world.now, 0.0
        self.machinery: Machinery
        self._places, self._world, self._ended = places, world, ended
        self._waiting: FairQueue[Job] = FairQueue()
        self._running: dict[str, Job] = {}

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def take(self, job: Job) -> None:
        """A request that was broken off elsewhere comes first, as in a server's line."""
        self._waiting.put((job.session.encode(),), job, first=job.is_resumed)
        self._admit()

    def is_over(self, job: Job) -> None:
        """Its machinery has said all of it; the place is free a moment later."""
        del self._running[job.name]
        self._world.after(0.0, self._admit)
        self._ended(job)

    def end(self) -> None:
        """It is gone at once."""
        self.gone, self.until = True, self._world.now
        self.machinery.end()

    def left(self) -> list[Job]:
        """All that ran or waited here, those that ran first."""
        jobs = list(self._running.values())
        while (job := self._waiting.take()) is not None:
            jobs.append(job)
        self._running.clear()
        return jobs

    def _admit(self) -> None:
        while not self.gone and len(self._running) < self._places:
            job = self._waiting.take()
            if job is None:
                return
            self._running[job.name] = job
            job.begins(self._world.now)
            self.machinery.begin(job)
