"""A drafter's work: feeds tokens, grows the branches that are pushed, and batches the forwards of several requests.

A commit makes tokens final: they stay in the token tree, update the calibration, and are fed if they were not drafted;
then the branches of the next chain under verification grow (`growth`). One `advance` or `read` is one forward of the
drafter, so that its caller can handle messages between two. Knows nothing of sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from outrider.drafters.drafter import TokenTree
from outrider.drafters.fan_out import BranchRequest, Calibration, FanOut, divide_branches
from outrider.drafters.growth import (
    MAX_CHILDREN,
    BranchGrowth,
    BranchTask,
    ChainAlternatives,
    Continuation,
    ReadyBranches,
    Result,
    Steps,
    find_committed_path,
    make_chain_feed,
)
from outrider.engine.forward_cost import ForwardCost
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.trees import TreeFeed

_MAX_TOKENS_WITH_CHAIN = 16  # committed tokens that can be fed together with the chain

# Below this weight of measurements there is no estimate, and so many branches are grown, in a forward and in all.
MIN_MEASUREMENTS, UNMEASURED_BRANCHES = 8.0, 8
_FORWARDS_PER_ROUND = 3  # if rows are expensive

Value = TypeVar("Value")
_FORWARD_ACTION = "the draft's forward"  # what failed, in errors


class WorkAhead:
    """Prepares the likely outcomes of the chain under verification; each forward makes all branches a token deeper.

    Committed tokens that were not drafted wait until they are fed: a few together with the chain, many (a prompt, or
    the text of a time without drafts) in pieces that are only read. Those wait until the target's features of them have
    arrived, if the tree reads features.
    """

    def __init__(
        self,
        tree: TokenTree,
        eos: Collection[int],
        fan_out: FanOut,
        calibration: Calibration,
        unread: Sequence[int] = (),
    ) -> None:
        """`unread`: the tokens of the text that the tree has not committed."""
        self.tree, self._eos = tree, frozenset(eos)
        self._fan_out, self._calibration = fan_out, calibration
        self.growth: BranchGrowth | None = None  # of the chain under verification
        self.proposed: ChainAlternatives | None = None
        self._unfed = list(unread)  # committed, and not yet fed
        self._task = BranchTask(None, 0)

    @property
    def committed_len(self) -> int:
        """The number of committed tokens, including those that wait to be fed."""
        return self.tree.committed_len + len(self._unfed)

    @property
    def must_read(self) -> bool:
        """Whether `read` has to feed committed tokens before anything can grow, and can."""
        return self._needs_reading and self.tree.can_read(len(self._unfed))

    @property
    def _needs_reading(self) -> bool:
        """Whether committed tokens can't be fed together with a chain: there are many, or there is no root."""
        return len(self._unfed) > _MAX_TOKENS_WITH_CHAIN or (bool(self._unfed) and not self.tree.can_grow())

    @property
    def has_work(self) -> bool:
        """Whether there is something to feed, or the end of the round has not been reported."""
        return self.growth.has_work if self.growth is not None else self._can_catch_up

    @property
    def _can_catch_up(self) -> bool:
        """Whether committed tokens can be fed before more features arrive."""
        return self.must_read or (bool(self._unfed) and not self._needs_reading)

    def commit(self, tokens: Sequence[int], task: BranchTask) -> None:
        """Commits `tokens`, then plans the branches after them.

        Nodes along that path are kept, all others are dropped. Near the end of the context branches become shorter,
        then none are prepared. Runs no forward, so of several commits in a row only the last one costs time.
        """
        if tokens and self.proposed is not None:  # before the tree drops the nodes of its chains
            self.proposed.update_calibration(self._calibration, tokens)
        if tokens and self.growth is not None:
            self.growth.learn(tokens)
        self.proposed, self.growth, self._task = None, None, task
        if not self._unfed and self.tree.can_grow():
            path = find_committed_path(self.tree, tokens)
            self.tree.commit(path)
            tokens = tokens[len(path) :]
        self._unfed += tokens
        self._begin_growth()

    def read(self) -> bool:
        """Reads a piece of the committed tokens that are not fed yet; returns whether no further one must be read."""
        self._unfed = self._unfed[self.tree.read(self._unfed) :]
        self._begin_growth()
        return not self.must_read

    def continuation(self, depth: int) -> Steps[Continuation]:
        """Returns the `depth` tokens after the committed text, chained on the device and evaluated once (SD)."""
        while self._can_catch_up:
            yield from self._catch_up()
        depth = min(depth, self.tree.room) if self.tree.can_grow() and not self._unfed else 0
        if depth < 1:
            return Continuation()
        nodes = [self.tree.root]
        for remaining in range(depth - 1, 0, -1):
            nodes += yield self.tree, TreeFeed(nodes[-1:], [None], [remaining])
        if self.tree.draws:
            return Continuation(tuple(self.tree.best(nodes)), self.tree.drawn_from(nodes))
        count = MAX_CHILDREN + len(self._eos) if self._task.min_prob < 1.0 else 2
        candidates = self.tree.candidates(nodes, count)
        self.proposed = ChainAlternatives.of([first.token for first, *_ in candidates], candidates)
        return self.proposed.tree(self._calibration, self._task.min_prob, self._eos)

    def advance(self, rows: int | None = None) -> Steps[ReadyBranches | None]:
        """Makes one forward, over committed tokens that are not fed yet or over the `rows` likeliest branches (None:
        all), which must be granted.

        Returns None if committed tokens were fed, so that there is nothing to push.
        """
        if self.growth is None:
            yield from self._catch_up()
            return None
        return (yield from self.growth.advance(rows))

    def _catch_up(self) -> Steps[None]:
        """Makes one forward over committed tokens; after the last of them, branches can be planned."""
        if self.must_read:
            self.read()
            return
        verifying = self._task.verifying
        line = [*self._unfed, *(verifying or ())]
        depth = self._task.depth if verifying is None else 1
        nodes = yield self.tree, make_chain_feed(self.tree, self.tree.root, line, depth)
        self.tree.commit(nodes[: len(self._unfed)])
        self._unfed = []
        self._begin_growth()

    def _begin_growth(self) -> None:
        """Begins the branches of the chain under verification, if all committed tokens are fed."""
        task, eos = self._task, self._eos
        if task.verifying is not None and not self._unfed and self.tree.can_grow():
            self.growth = BranchGrowth(self.tree, task.verifying, task, eos, self._fan_out, self._calibration)


class Capacity:
    """Estimates how many branches can be ready before the target's outcome; old measurements lose weight.

    `forwards`: the time of a forward by its rows. `rounds`: the time between two commits of a request in SSD.
    """

    def __init__(self) -> None:
        self.forwards, self.rounds = ForwardCost(), ForwardCost()

    def max_branches(self, depth: int) -> int:
        """Returns how many branches of this depth can grow in a round, over all requests.

        They take one forward more than their depth, because branches of full acceptance begin with the second.
        """
        if min(self.rounds.seen, self.forwards.seen) < MIN_MEASUREMENTS:
            return UNMEASURED_BRANCHES
        fixed, each = self.forwards.line
        room = self.rounds(1) / (depth + 1) - fixed
        return max(int(room / each), 0)

    def rows_per_forward(self) -> int:
        """Returns how many branches one forward should grow, so that several forwards end in a round. It should grow
        more if a forward itself costs more than these rows, as on a GPU; while forwards of one size do not show that,
        it counts as free, so that smaller ones are tried."""
        if min(self.rounds.seen, self.forwards.seen) < MIN_MEASUREMENTS:
            return UNMEASURED_BRANCHES
        fixed, each = self.forwards.line
        in_time = (self.rounds(1) / _FORWARDS_PER_ROUND - fixed) / each
        return max(int(in_time), math.ceil(fixed / each), 2)


class DraftBatcher:
    """Makes the forwards that grow branches under one budget, each for all requests that need one."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.capacity = Capacity()
        self._calibration = calibration or Calibration()
        self._unread = np.zeros(3)  # the latest forwards, their rows and ms: lazy ones take theirs when one is read

    def advance(self, works: Sequence[WorkAhead], active: int = 1) -> list[ReadyBranches | OutriderError | None]:
        """Makes one forward for all `works`; returns their branches, or the error of one that failed.

        `active`: the number of requests that share the drafter's time.
        """
        started_ns = clock.now()
        demands = [_call_catching(work.growth.request) if work.growth is not None else None for work in works]
        demanded = list(zip(works, demands, strict=True))
        asking = [(own.growth, asked) for own, asked in demanded if own.growth and isinstance(asked, BranchRequest)]
        self._grant(asking, active)
        failed = {id(work): demand for work, demand in demanded if isinstance(demand, OutriderError)}
        sound = [work for work in works if id(work) not in failed]
        at_once = self.capacity.rows_per_forward() if active == 1 else None
        found, rows = run_together([work.advance(at_once) for work in sound])
        self._unread += (1, rows, (clock.now() - started_ns) / clock.MILLISECOND_NS) if rows else 0
        if self._unread.any() and any(found):
            self.capacity.forwards.add(*(self._unread[1:] / self._unread[0]).tolist())
            self._unread = np.zeros(3)
        results = iter(found)
        return [failed[id(work)] if id(work) in failed else next(results) for work in works]

    def _grant(self, requests: Sequence[tuple[BranchGrowth, BranchRequest]], active: int) -> None:
        """Divides the branches that can be ready in time; a share is left for requests that come later in the round."""
        demands = [demand for _, demand in requests]
        deepest = max((demand.depth for demand in demands), default=0)
        budget = self.capacity.max_branches(deepest) * len(demands) // active if active > 1 else None
        for (growth, demand), share in zip(requests, divide_branches(demands, budget, self._calibration), strict=True):
            growth.grant(demand, share)


@dataclass(frozen=True, slots=True)
class DraftTurn:
    """A request in the target's process that drafts by these `steps`; requests of one drafter share its forwards.
    `read` first has to read the text, a piece in each call, until it returns True; None: there is nothing to read."""

    steps: Steps[Continuation]
    read: Callable[[], bool] | None = None


def run_together(steps: Sequence[Steps[Result]]) -> tuple[list[Result | OutriderError], int]:
    """Runs these steps of one drafter to their ends; their trees share each forward.

    Returns the result of each, or the error of one that failed, and the number of tokens that were fed.
    """
    runs, results, rows = [_run_catching(own) for own in steps], dict[int, Result | OutriderError](), 0
    fed: dict[int, Any] = dict.fromkeys(range(len(runs)))  # the new nodes of each, or the error that took their place
    while fed:
        feeds = dict[int, tuple[TokenTree, TreeFeed]]()
        for index, nodes in fed.items():
            run = runs[index]
            try:
                feeds[index] = run.throw(nodes) if isinstance(nodes, OutriderError) else run.send(nodes)
            except StopIteration as ended:
                results[index] = ended.value
        rows += sum(len(feed.tokens) for _, feed in feeds.values())
        found = _feed_trees(list(feeds.values())) if feeds else ()
        fed = dict(zip(feeds, found, strict=True))
    return [results[index] for index in range(len(runs))], rows


def _run_catching(steps: Steps[Result]) -> Steps[Result | OutriderError]:
    """Runs these steps, and returns an error instead of raising it."""
    try:
        with wrap_model_errors(_FORWARD_ACTION):
            return (yield from steps)
    except OutriderError as error:
        return error


def _feed_trees(fed: Sequence[tuple[TokenTree, TreeFeed]]) -> Sequence[list[int] | OutriderError]:
    """Makes one forward. If it fails, makes one for each tree, so that only those requests end whose own forward fails.
    Returns each tree's new nodes."""
    trees, feeds = [tree for tree, _ in fed], [feed for _, feed in fed]
    nodes = _call_catching(lambda: type(trees[0]).feed_together(trees, feeds))
    if not isinstance(nodes, OutriderError):
        return nodes
    return [nodes] if len(fed) == 1 else [_feed_trees([one])[0] for one in fed]


def _call_catching(task: Callable[[], Value]) -> Value | OutriderError:
    """Returns the result of `task`, or its error."""
    try:
        with wrap_model_errors(_FORWARD_ACTION):
            return task()
    except OutriderError as error:
        return error
