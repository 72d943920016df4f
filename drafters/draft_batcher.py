"""Batches the forwards of several requests' drafting, under one budget of branches.

The tokens that the requests want to feed are fed in one forward. If a joint forward fails, each request is tried alone,
so that only a request whose own forward fails ends.

`Capacity` estimates how many branches can be ready before the target's outcome, from the time of a forward by its rows
and the length of a round. Old measurements fade.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from outrider.drafters.continuation import Continuation
from outrider.drafters.drafter import BatchingDrafter, Drafter, TokenTree
from outrider.drafters.fan_out import BranchRequest, Calibration, shares
from outrider.drafters.growth import ReadyBranches, Result, Steps
from outrider.drafters.work_ahead import WorkAhead
from outrider.engine.pace import FADE, ForwardCost
from outrider.engine.tree_feed import TreeFeed
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, named_errors

# Below this many measurements there is no estimate.
ENOUGH = 8.0


class Capacity:
    """Live estimates of a drafter's forwards and of the rounds."""

    def __init__(self) -> None:
        self._cost = ForwardCost()
        self._rounds = self._round_ms = 0.0

    def forward(self, rows: int, ms: float) -> None:
        """Records a forward of `rows` tokens, which took `ms`."""
        self._cost.add(rows, ms)

    def round(self, ms: float) -> None:
        """Records the time between two commits of a request in SSD."""
        self._rounds = self._rounds * FADE + 1.0
        self._round_ms = self._round_ms * FADE + ms

    def branches(self, depth: int) -> int | None:
        """Returns how many branches of this depth can grow in a round, over all requests; None: not known yet.

        They take one forward more than their depth, because branches of full acceptance begin with the second.
        """
        if min(self._rounds, self._cost.seen) < ENOUGH:
            return None
        fixed, each = self._cost.line
        room = self._round_ms / self._rounds / (depth + 1) - fixed
        return max(int(room / each), 0)


Value = TypeVar("Value")


class DraftBatcher:
    """Makes the forwards of `drafter` for all requests that need one."""

    def __init__(self, drafter: Drafter, calibration: Calibration | None = None) -> None:
        self.capacity = Capacity()
        self._joining = drafter if isinstance(drafter, BatchingDrafter) else None
        self._calibration = calibration or Calibration()

    def advance(self, works: Sequence[WorkAhead], active: int = 1) -> list[ReadyBranches | OutriderError | None]:
        """Makes one forward for all `works`; returns their branches, or the error of one that failed.

        `active`: the number of requests that share the drafter's time.
        """
        started_ns = clock.now()
        wishes = [_try(work.wish) for work in works]
        self._grant(
            [(work, wish) for work, wish in zip(works, wishes, strict=True) if isinstance(wish, BranchRequest)], active
        )
        failed = {id(work): wish for work, wish in zip(works, wishes, strict=True) if isinstance(wish, OutriderError)}
        sound = [work for work in works if id(work) not in failed]
        jobs = [_Job(work.tree, work.advance()) for work in sound]
        rows = self._run(jobs)
        if rows:
            self.capacity.forward(rows, (clock.now() - started_ns) / clock.MILLISECOND_NS)
        results = (job.result() for job in jobs)
        return [failed[id(work)] if id(work) in failed else next(results) for work in works]

    def _grant(self, requests: Sequence[tuple[WorkAhead, BranchRequest]], active: int) -> None:
        """Divides the branches that can be ready in time; a share is left for requests that come later in the round."""
        wishes = [wish for _, wish in requests]
        budget = self.capacity.branches(max((wish.depth for wish in wishes), default=0)) if active > 1 else None
        if budget is not None:
            budget = budget * len(wishes) // active
        for (work, wish), share in zip(requests, shares(wishes, budget, self._calibration), strict=True):
            work.grant(wish, share)

    def continuations(self, works: Sequence[WorkAhead], depths: Sequence[int]) -> list[Continuation | OutriderError]:
        """Returns the `depths` tokens after each committed text, or the error of one that failed."""
        jobs = [_Job(work.tree, work.continuation(depth)) for work, depth in zip(works, depths, strict=True)]
        self._run(jobs)
        return [job.result() for job in jobs]

    def _run(self, jobs: Sequence[_Job[Result]]) -> int:
        """Runs all jobs to their end. Returns the number of tokens that were fed."""
        rows = 0
        for job in jobs:
            job.begin()
        while waiting := [job for job in jobs if job.feed is not None]:
            rows += sum(len(job.wanted().tokens) for job in waiting)
            for job, nodes in zip(waiting, self._feed(waiting), strict=True):
                job.go_on(nodes)
        return rows

    def _feed(self, jobs: Sequence[_Job[Result]]) -> list[list[int] | OutriderError]:
        """Makes one forward, or one for each job if they can't be joined; returns each job's new nodes."""
        if self._joining is not None and len(jobs) > 1:
            trees, feeds, join = [job.tree for job in jobs], [job.wanted() for job in jobs], self._joining.feed_together
            nodes = _try(lambda: join(trees, feeds))
            if not isinstance(nodes, OutriderError):
                return list(nodes)
        return [_try(job.feed_alone) for job in jobs]


class _Job(Generic[Result]):
    """One request's work, which waits for `feed`; None: it has ended."""

    def __init__(self, tree: TokenTree, steps: Steps[Result]) -> None:
        self.tree, self._steps = tree, steps
        self.feed: TreeFeed | None = None
        self._result: list[Result | OutriderError] = []

    def begin(self) -> None:
        self._step(lambda: next(self._steps))

    def go_on(self, nodes: list[int] | OutriderError) -> None:
        if isinstance(nodes, OutriderError):
            self.feed = None
            self._result.append(nodes)
        else:
            self._step(lambda: self._steps.send(nodes))

    def wanted(self) -> TreeFeed:
        if self.feed is None:
            raise ValueError("this job has ended; only one that waits can be fed")
        return self.feed

    def feed_alone(self) -> list[int]:
        feed = self.wanted()
        return self.tree.feed(feed.parents, feed.tokens)

    def result(self) -> Result | OutriderError:
        return self._result[0]

    def _step(self, step: Callable[[], TreeFeed]) -> None:
        def run() -> TreeFeed | None:
            try:
                return step()
            except StopIteration as ended:
                self._result.append(ended.value)
                return None

        feed = _try(run)
        if isinstance(feed, OutriderError):
            self._result.append(feed)
            self.feed = None
        else:
            self.feed = feed


def _try(task: Callable[[], Value]) -> Value | OutriderError:
    """Returns the result of `task`, or its error."""
    try:
        with named_errors("the draft's forward"):
            return task()
    except OutriderError as error:
        return error
