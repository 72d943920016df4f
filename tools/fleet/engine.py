"""An engine as the ingress sees it: a queue of requests, and slots in which requests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.orchestrator.front.admission import FairQueue
from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.job import Job


class TokenSource(Protocol):
    """Generates an engine's tokens."""

    @property
    def busy(self) -> float:
        """Seconds in which the target worked."""
        ...

    def begin(self, job: Job) -> None: ...

    def end(self) -> None: ...

    def lose_drafters(self, count: int, noticed: float) -> None: ...

    def regain_drafters(self) -> None: ...


class Engine:
    """Engine `number` in `zone`, with `slots` for requests. Calls `ended` with each complete request.

    `is_routable`: the ingress may choose it. `since`, `until`: the time in which it exists.
    """

    def __init__(self, number: int, zone: int, slots: int, loop: EventLoop, ended: Callable[[Job], None]) -> None:
        self.number, self.zone = number, zone
        self.is_stopped, self.is_routable = False, True
        self.since, self.until = loop.now, 0.0
        self.source: TokenSource
        self._slots, self._loop, self._ended = slots, loop, ended
        self._waiting: FairQueue[Job] = FairQueue()
        self._running: dict[str, Job] = {}

    @property
    def load(self) -> int:
        """The number of requests that run or wait here."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def take(self, job: Job) -> None:
        """Queues a request. A request that was interrupted elsewhere comes first, as in a server's queue."""
        self._waiting.put((job.session.encode(),), job, first=job.is_resumed)
        self._admit()

    def on_complete(self, job: Job) -> None:
        """Handles a request whose tokens are complete. Its slot is free in the next event."""
        del self._running[job.name]
        self._loop.call_later(0.0, self._admit)
        self._ended(job)

    def end(self) -> None:
        """Stops the engine at once."""
        self.is_stopped, self.until = True, self._loop.now
        self.source.end()

    def remove_all(self) -> list[Job]:
        """Removes and returns all requests, running ones first."""
        jobs = [*self._running.values(), *(self._waiting.take() for _ in range(len(self._waiting)))]
        self._running.clear()
        return jobs

    def _admit(self) -> None:
        while not self.is_stopped and len(self._waiting) and len(self._running) < self._slots:
            job = self._waiting.take()
            self._running[job.name] = job
            job.start(self._loop.now)
            self.source.begin(job)
