"""A drafter's work: feeds tokens, grows the branches that are pushed, and batches the forwards of several requests.

A commit makes tokens final: they stay in the token tree, update the calibration, and are fed if they were not drafted;
then the branches of the next chain under verification grow (`growth`). One `advance` is one forward of the drafter, so
that its caller can read messages between two. `begin` opens a request: the drafter reads its text, with drawn
continuations if the request's sampling needs them.

`DraftBatcher` feeds the tokens that several requests want to feed in one forward, under one budget of branches. If a
joint forward fails, each request is tried alone, so that only a request whose own forward fails ends. `Capacity`
estimates how many branches can be ready before the target's outcome, from the time of a forward by its rows and the
length of a round; old measurements fade. Knows nothing of sockets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from outrider.drafters.drafter import Drafter, DrafterFault, FeatureTree, TokenTree
from outrider.drafters.fan_out import BranchRequest, Calibration, FanOut, shares
from outrider.drafters.growth import (
    WIDTH,
    BranchGrowth,
    BranchTask,
    ChainAlternatives,
    Continuation,
    ReadyBranches,
    Result,
    Steps,
    committed_path,
    feed_of,
    next_tokens,
)
from outrider.engine.forward_cost import FADE, ForwardCost
from outrider.grammar.constraint import Constraint
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, named_errors
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Halves
from outrider.protocol.trees import TreeFeed

_PIECE = 256  # committed tokens a forward, if there are more than _BESIDE, which are fed together with the chain
_BESIDE = 16


class WorkAhead:
    """Prepares the likely outcomes of the chain under verification; each forward makes all branches a token deeper.

    Committed tokens that were not drafted wait until an `advance` feeds them: a few together with the chain, many
    (after a time without drafts) in pieces that are only read. They also wait while a tree that reads the target's
    features can't grow yet.
    """

    def __init__(
        self,
        tree: TokenTree,
        eos: Collection[int],
        fan_out: FanOut,
        calibration: Calibration,
    ) -> None:
        self.tree = tree
        self._feature_tree = tree if isinstance(tree, FeatureTree) else None
        self._eos = frozenset(eos)
        self._fan_out = fan_out
        self._calibration = calibration
        self.growth: BranchGrowth | None = None  # of the chain under verification
        self.proposed: ChainAlternatives | None = None
        self._behind: list[int] = []  # committed, and not yet fed
        self._task = BranchTask(None, 0)

    @property
    def committed_len(self) -> int:
        """The number of committed tokens, including those that wait to be fed."""
        return self.tree.committed_len + len(self._behind)

    @property
    def far_behind(self) -> bool:
        """Whether a continuation would first have to feed many tokens: `advance` feeds them in pieces."""
        return len(self._behind) > _BESIDE and self._can_grow

    @property
    def busy(self) -> bool:
        """Whether a forward is worth making, or the end of the round has not been reported."""
        return self._can_grow and (self.growth.busy if self.growth is not None else bool(self._behind))

    def commit(self, tokens: Sequence[int], task: BranchTask) -> None:
        """Makes `tokens` final, then plans the branches after them.

        Nodes along that path are kept, all others are dropped. Near the end of the context branches become shorter,
        then none are prepared. Makes no forward: of several commits in a row only the last one costs work.
        """
        if tokens and self.proposed is not None:  # before the tree drops the nodes of its chains
            self.proposed.teach(self._calibration, tokens)
        if tokens and self.growth is not None:
            self.growth.learn(tokens)
        self.proposed, self.growth, self._task = None, None, task
        if not self._behind and self._can_grow:
            path = committed_path(self.tree, tokens)
            self.tree.commit(path)
            tokens = tokens[len(path) :]
        self._behind += tokens
        self._begin_growth()

    def add_features(self, position: int, rows: Halves) -> None:
        """Adds the target's features of tokens from `position` on; ignored if the tree does not read them."""
        if self._feature_tree is None:
            return
        self._feature_tree.add_features(position, rows)
        if self.growth is None:
            self._begin_growth()

    @property
    def _can_grow(self) -> bool:
        """Whether something can grow or be read before more features arrive."""
        return self._feature_tree is None or self._feature_tree.ready(len(self._behind))

    @property
    def _has_root(self) -> bool:
        return self._feature_tree is None or self._feature_tree.ready()

    def continuation(self, depth: int) -> Steps[Continuation]:
        """Returns the `depth` tokens after the committed text, chained on the device and evaluated once (SD)."""
        while self._behind and self._can_grow:
            yield from self._catch_up()
        depth = min(depth, self.tree.room) if self._has_root else 0
        if depth < 1:
            return Continuation()
        nodes = [self.tree.root]
        for wanted in range(depth - 1, 0, -1):
            nodes += yield TreeFeed(nodes[-1:], [None], [wanted])
        if self._task.min_prob >= 1.0 or self.tree.draws:
            chain, odds = zip(*next_tokens(self.tree, nodes, self._calibration), strict=True)
            return Continuation(chain, self.tree.drawn_from(nodes), odds=odds)
        chain = tuple(self.tree.best(nodes))
        self.proposed = ChainAlternatives.of(chain, self.tree.candidates(nodes, WIDTH + len(self._eos)))
        return self.proposed.tree(self._calibration, self._task.min_prob)

    def advance(self, rows: int | None = None) -> Steps[ReadyBranches | None]:
        """Makes one forward, over committed tokens that are not fed yet or over the `rows` likeliest branches (None:
        all), which must be granted.

        Returns None if committed tokens were fed, so that there is nothing to push.
        """
        if self._behind:
            yield from self._catch_up()
            return None
        if self.growth is None:
            return ReadyBranches((), 0, True)
        return (yield from self.growth.advance(rows))

    def _catch_up(self) -> Steps[None]:
        """Makes one forward over committed tokens; after the last of them, branches can be planned."""
        if self.far_behind or not self._has_root:
            piece, self._behind = self._behind[:_PIECE], self._behind[_PIECE:]
            self.tree.read(piece, more=len(self._behind) > _BESIDE)
        else:
            verifying = self._task.verifying
            line = [*self._behind, *(verifying or ())]
            nodes = yield feed_of(self.tree, self.tree.root, line, self._task.depth if verifying is None else 1)
            self.tree.commit(nodes[: len(self._behind)])
            self._behind = []
        self._begin_growth()

    def _begin_growth(self) -> None:
        """Begins the branches of the chain under verification, if all committed tokens are fed."""
        task, eos = self._task, self._eos
        if task.verifying is not None and not self._behind and self._has_root:
            self.growth = BranchGrowth(self.tree, task.verifying, task, eos, self._fan_out, self._calibration)


def begin(
    drafter: Drafter,
    tokens: Sequence[int],
    sampling: SamplingParams,
    eos: Collection[int],
    fan_out: FanOut,
    calibration: Calibration,
    *,
    cached: int = 1,
    progress: Callable[[int, int], None] | None = None,
    constraint: Constraint | None = None,
) -> WorkAhead:
    """Reads `tokens` and returns the work for them. Continuations are drawn for residual sampling if the drafter can.

    Args:
        cached: the number of continuations of a node whose weight Saguaro's factor lowers.
        progress: called as (tokens done, tokens in all); may raise to end the call.
        constraint: the text's grammar, so that only tokens that it allows are proposed.

    Raises:
        DrafterFault: the drafter can't handle these tokens.
    """
    check_known(drafter, tokens)
    if len(tokens) >= drafter.context_length:
        raise DrafterFault(
            f"the text has {len(tokens)} tokens and the draft model's context is {drafter.context_length}; drafting is"
            " off for this request"
        )
    return WorkAhead(drafter.open(tokens, sampling, progress, constraint, cached), eos, fan_out, calibration)


def check_known(drafter: Drafter, tokens: Sequence[int]) -> None:
    """Checks that the draft model has these tokens: the target may have more, padding that only random models produce.

    Raises:
        DrafterFault: it lacks one.
    """
    foreign = max(tokens, default=0)
    if foreign >= drafter.vocab_size:
        raise DrafterFault(
            f"token {foreign} is not among the {drafter.vocab_size} tokens of the draft model; drafting is off"
            " from here on"
        )


# Below this many measurements there is no estimate.
ENOUGH = 8.0
_FORWARDS = 3  # in a round, if rows cost much


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

    def rows(self) -> int | None:
        """Returns how many branches one forward should grow, so that several forwards end in a round; None: not known.
        It grows more where a forward itself costs more than these rows, as a GPU's does.
        """
        if min(self._rounds, self._cost.seen) < ENOUGH or not self._cost.line[0]:
            return None  # forwards of one size do not show what a row costs
        fixed, each = self._cost.line
        in_time = (self._round_ms / self._rounds / _FORWARDS - fixed) / each
        return max(int(in_time), math.ceil(fixed / each), 2)


Value = TypeVar("Value")
_FORWARD = "the draft's forward"  # what failed, in errors


class DraftBatcher:
    """Makes a drafter's forwards for all requests that need one."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.capacity = Capacity()
        self._calibration = calibration or Calibration()

    def advance(self, works: Sequence[WorkAhead], active: int = 1) -> list[ReadyBranches | OutriderError | None]:
        """Makes one forward for all `works`; returns their branches, or the error of one that failed.

        `active`: the number of requests that share the drafter's time.
        """
        started_ns = clock.now()
        wishes = [_try(work.growth.request) if work.growth is not None else None for work in works]
        asked = list(zip(works, wishes, strict=True))
        self._grant(
            [(work.growth, wish) for work, wish in asked if work.growth and isinstance(wish, BranchRequest)], active
        )
        failed = {id(work): wish for work, wish in asked if isinstance(wish, OutriderError)}
        sound = [work for work in works if id(work) not in failed]
        at_once = self.capacity.rows() if active == 1 else None
        found, rows = run_together([work.tree for work in sound], [work.advance(at_once) for work in sound])
        if rows:
            self.capacity.forward(rows, (clock.now() - started_ns) / clock.MILLISECOND_NS)
        results = iter(found)
        return [failed[id(work)] if id(work) in failed else next(results) for work in works]

    def _grant(self, requests: Sequence[tuple[BranchGrowth, BranchRequest]], active: int) -> None:
        """Divides the branches that can be ready in time; a share is left for requests that come later in the round."""
        wishes = [wish for _, wish in requests]
        budget = self.capacity.branches(max((wish.depth for wish in wishes), default=0)) if active > 1 else None
        if budget is not None:
            budget = budget * len(wishes) // active
        for (growth, wish), share in zip(requests, shares(wishes, budget, self._calibration), strict=True):
            growth.grant(wish, share)

    def continuations(self, works: Sequence[WorkAhead], depths: Sequence[int]) -> list[Continuation | OutriderError]:
        """Returns the `depths` tokens after each committed text, or the error of one that failed."""
        steps = [work.continuation(depth) for work, depth in zip(works, depths, strict=True)]
        return run_together([work.tree for work in works], steps)[0]


def run_together(
    trees: Sequence[TokenTree], steps: Sequence[Steps[Result]]
) -> tuple[list[Result | OutriderError], int]:
    """Runs the steps of these trees to their ends; they share each forward.

    Returns the result of each, or the error of one that failed, and the number of tokens that were fed.
    """
    runs, results, rows = [_caught(own) for own in steps], dict[int, Result | OutriderError](), 0
    fed: dict[int, Any] = dict.fromkeys(range(len(runs)))  # the new nodes of each, or the error that took their place
    while fed:
        feeds = dict[int, TreeFeed]()
        for index, nodes in fed.items():
            run = runs[index]
            try:
                feeds[index] = run.throw(nodes) if isinstance(nodes, OutriderError) else run.send(nodes)
            except StopIteration as ended:
                results[index] = ended.value
        rows += sum(len(feed.tokens) for feed in feeds.values())
        found = _feed([trees[index] for index in feeds], list(feeds.values())) if feeds else ()
        fed = dict(zip(feeds, found, strict=True))
    return [results[index] for index in range(len(runs))], rows


def _caught(steps: Steps[Result]) -> Steps[Result | OutriderError]:
    """Makes these steps, and returns their error instead of raising it."""
    try:
        with named_errors(_FORWARD):
            return (yield from steps)
    except OutriderError as error:
        return error


def _feed(trees: Sequence[TokenTree], feeds: Sequence[TreeFeed]) -> Sequence[list[int] | OutriderError]:
    """Makes one forward, or one for each tree if that fails; returns each tree's new nodes."""
    nodes = _try(lambda: type(trees[0]).feed_together(trees, feeds))
    if not isinstance(nodes, OutriderError):
        return nodes
    if len(trees) == 1:
        return [nodes]
    return [_feed([tree], [feed])[0] for tree, feed in zip(trees, feeds, strict=True)]


def _try(task: Callable[[], Value]) -> Value | OutriderError:
    """Returns the result of `task`, or its error."""
    try:
        with named_errors(_FORWARD):
            return task()
    except OutriderError as error:
        return error
