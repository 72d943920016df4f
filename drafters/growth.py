"""Grows the branches of one chain under verification: each forward makes the likeliest of them one token deeper.

A forward grows all branches if rows are cheap compared with a forward, as on a GPU. On a CPU, where each row costs, it
grows only as many as leave time for other forwards in the same round, so that the likeliest outcomes are ready first.

Paper, sections 3 and 4. Works on one tree, and reuses the nodes of earlier rounds, so that nothing is fed twice. The
work is a generator (`Steps`) that yields whenever it needs a forward, so that several requests can share one
(`work_ahead`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from outrider.drafters.drafter import TokenTree
from outrider.drafters.fan_out import MAX_RANK, BranchRequest, Calibration, FanOut, ForkPoint, stop_probabilities
from outrider.protocol.messages import Alternatives, Branch
from outrider.protocol.schema import MAX_ALTERNATIVES
from outrider.protocol.trees import (
    ROOT,
    Candidate,
    SparseQ,
    TreeFeed,
    chain_parents,
    common_prefix_length,
    first_branch,
)

MAX_CHILDREN = 3
"""The maximum number of tokens after a token: the chain's own and its alternatives."""

Result = TypeVar("Result")
Steps = Generator[tuple[TokenTree, TreeFeed], list[int], Result]
"""Yields a tree and what to feed it, and is sent the new nodes."""


def without_forwards(result: Result) -> Steps[Result]:
    """Returns steps that end at once, with this result."""
    yield from ()
    return result


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a drafter proposes after the committed text, a chain or a tree of a chain and alternatives to its tokens,
    and the distributions that the tokens were drawn from, if any.

    With `parents` the tokens are a tree (`protocol.trees`), whose first branch is the drafter's chain. `odds` holds the
    probability that each token is accepted if the one before it is; (): not known.
    """

    chain: tuple[int, ...] = ()
    q: SparseQ | None = None
    parents: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or the first branch of the tree."""
        return tuple(self.chain[node] for node in first_branch(self.parents)) if self.parents else self.chain

    def without(self, ends: Collection[int]) -> Continuation:
        """Returns it without end tokens and what follows them, which need no rows. A drawn chain stays as it is:
        whether a token is verified must not depend on the draw."""
        if self.q is not None or not ends:
            return self
        chain, parents, numbers = list[int](), list[int](), {ROOT: ROOT}
        above = self.parents or chain_parents(len(self.chain))
        for node, (token, parent) in enumerate(zip(self.chain, above, strict=True)):
            if parent in numbers and token not in ends:
                numbers[node] = len(chain)
                chain.append(token)
                parents.append(numbers[parent])
        return Continuation(tuple(chain), None, tuple(parents) if self.parents else ())

    @property
    def alternatives(self) -> Alternatives | None:
        """The alternatives of a tree, whose nodes begin with the first branch."""
        count = len(first_branch(self.parents))
        return Alternatives(self.chain[count:], self.parents[count:], self.odds[count:]) if self.parents else None


def count_worthwhile_positions(count: int, calibration: Calibration, threshold: float) -> int:
    """Returns how many of a chain's first tokens can have an alternative with a probability above `threshold`."""
    mass, worth = 1.0, 0
    for position in range(count):
        rate = calibration.acceptance(position)
        if mass * (1.0 - rate) > threshold:
            worth = position + 1
        mass *= rate
    return worth


@dataclass(frozen=True, slots=True)
class ChainAlternatives:
    """A chain and the alternatives at its first positions, the fork points before its tokens."""

    chain: tuple[int, ...]
    points: Sequence[ForkPoint]

    @classmethod
    def of(cls, chain: Sequence[int], candidates: Sequence[Sequence[Candidate]]) -> ChainAlternatives:
        """Returns the alternatives of a chain, given the `candidates` at its first positions, best first."""
        return cls(tuple(chain), [ForkPoint.of(token, own) for token, own in zip(chain, candidates, strict=False)])

    def tree(self, calibration: Calibration, threshold: float, eos: Collection[int] = ()) -> Continuation:
        """Returns a tree of the chain, then the alternatives but `eos` likelier than `threshold`, by position."""
        count, mass = len(self.chain), 1.0
        tokens, parents, odds = list(self.chain), list(chain_parents(count)), [0.0] * count
        for index, point in enumerate(self.points):
            odds[index] = rate = calibration.acceptance(index, point.own_gap)
            for rank, token in enumerate(point.others[: MAX_CHILDREN - 1]):
                share = (1.0 - rate) * calibration.bonus_probability(False, rank, point)
                if mass * share > threshold and token not in eos and len(tokens) - count < MAX_ALTERNATIVES:
                    tokens.append(token)
                    parents.append(index - 1)
                    odds.append(share)
            mass *= rate
        return Continuation(tuple(tokens), None, tuple(parents) if len(tokens) > count else (), tuple(odds))

    def update_calibration(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """Updates the calibration by the tokens that became final, which may be fewer than the chain's."""
        accepted = common_prefix_length(self.chain, tokens)
        points = self.points[: accepted + 1]
        if accepted == len(tokens):
            calibration.learn(points[:accepted], accepted, accepted, None)
            return
        bonus, others = tokens[accepted], points[accepted].others if accepted < len(points) else ()
        calibration.learn(points, len(self.chain), accepted, others.index(bonus) if bonus in others else None)


def next_tokens(tree: TokenTree, nodes: Sequence[int], calibration: Calibration) -> list[tuple[int, float]]:
    """Returns each node's best continuation, and the probability that it is accepted if the node is, by its gap. A
    drawn one counts as certain, because what is verified must not depend on the token drawn."""
    if tree.draws:
        return [(token, 1.0) for token in tree.best(nodes)]
    found: list[tuple[int, float]] = []
    for first, *others in tree.candidates(nodes, 2):
        found.append((first.token, calibration.acceptance(0, others[0].gap if others else math.inf)))
    return found


def find_child(tree: TokenTree, node: int, token: int, given: bool) -> int | None:
    """Returns the fed node for `token` right after `node`, or None; in drawn chains only one with the right noise.

    A drawn chain begins after a token that was given. After a drawn one, tokens would be drawn by the noise of an
    earlier position, which may also have drawn the chain under verification.
    """
    return tree.child(node, token, given if tree.draws else None)


def find_fed_path(tree: TokenTree, node: int, tokens: Sequence[int]) -> list[int]:
    """Returns the fed nodes of the longest prefix of `tokens` after `node`."""
    path: list[int] = []
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return path


def find_committed_path(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Returns the fed nodes of the longest prefix of committed `tokens`; a chain can begin at the last token's."""
    path = find_fed_path(tree, tree.root, tokens[:-1])
    if tokens and len(path) == len(tokens) - 1:
        last = find_child(tree, (path or [tree.root])[-1], tokens[-1], given=True)
        path += [last] if last is not None else []
    return path


def make_chain_feed(tree: TokenTree, node: int, tokens: Sequence[int], depth: int = 1) -> TreeFeed:
    """Returns the feed of `tokens` in a row, the first after `node`; `depth`: how many will follow the last."""
    following = range(tree.next_node, tree.next_node + len(tokens) - 1)
    return TreeFeed([node, *following][: len(tokens)], tokens, [*[1] * len(tokens[1:]), depth][: len(tokens)])


@dataclass(frozen=True, slots=True)
class BranchTask:
    """The work after a commit: prepare `branches` outcomes of the chain `verifying` (None: none), `depth` tokens each.

    The `rank_offset` likeliest outcomes belong to other drafters. Branches include alternatives with a probability
    above `min_prob`.
    """

    verifying: tuple[int, ...] | None
    depth: int
    branches: int = 0
    rank_offset: int = 0
    min_prob: float = 1.0


@dataclass(frozen=True, slots=True)
class ReadyBranches:
    """The result of one forward: branches to push at their current depth, and whether the round is complete.

    `q`: the distributions that the chains were drawn from, if they were.
    """

    entries: tuple[Branch, ...]
    final: bool
    q: SparseQ | None = None


@dataclass(slots=True)
class GrowingBranch:
    """A growing branch: the tokens of its `chain`, their `odds`, and the probability of its `outcome`.

    `nodes` are its fed nodes, beginning with the bonus token's; chain token i follows `nodes[i]`.
    """

    accepted: int
    bonus: int
    outcome: float
    chain: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


class BranchGrowth:
    """The growth of the branches of one chain.

    `_spine[k]` is the node after which the outcome (k, t) places its bonus token t: the root, then the chain's nodes as
    far as they are fed. `_points[k]` has the drafter's candidates there, None until they are read. `_ranks[k]` are
    the candidates that get a branch; for k below `_forked` their branches have begun.
    """

    def __init__(
        self,
        tree: TokenTree,
        chain: tuple[int, ...],
        task: BranchTask,
        eos: Collection[int],
        fan_out: FanOut,
        calibration: Calibration,
    ) -> None:
        self._tree, self._chain, self._task, self._eos = tree, chain, task, eos
        self._fan_out, self._calibration = fan_out, calibration
        self._depth = min(task.depth, tree.room - len(chain) - 1)
        self._spine = [tree.root, *find_fed_path(tree, tree.root, chain)]
        self._points: list[ForkPoint | None] = [None] * (len(chain) + 1)
        self._ranks: list[range] = []
        self._growing: list[GrowingBranch] = []
        self._has_begun = False
        self._forked = 0 if self._depth > 0 and task.branches > 0 else len(chain) + 1

    @property
    def has_work(self) -> bool:
        """Whether there is something to feed, or the end of the round has not been reported."""
        return not self._has_begun or not self._is_forked or bool(self._growing)

    @property
    def _is_forked(self) -> bool:
        """Whether all branches have begun, or there are to be none."""
        return self._forked > len(self._chain)

    def request(self) -> BranchRequest | None:
        """Returns a request for the branches that it needs; None if they have been granted, or it needs none."""
        if self._ranks or self._is_forked:
            return None
        self._read_candidates(range(len(self._spine)))
        return BranchRequest(self._points, self._task.branches, self._depth, self._task.rank_offset)

    def grant(self, demand: BranchRequest, branches: int) -> None:
        """Divides `branches` among the fork points: those that the fan-out chooses after the first `rank_offset`."""
        points, offset = demand.points, demand.rank_offset
        until = self._fan_out(points, offset + branches, self._calibration)
        since = self._fan_out(points, offset, self._calibration)
        self._ranks = [range(first, last) for first, last in zip(since, until, strict=True)]

    def advance(self, rows: int | None = None) -> Steps[ReadyBranches]:
        """Makes one forward: begins new branches, feeds the rest of the chain, and grows `rows` branches (None: all) by
        a token, those whose tokens so far are the likeliest to be accepted."""
        self._has_begun = True
        complete, grown = self._fork(), self._growing
        if rows is not None:
            grown = heapq.nlargest(rows, grown, key=lambda branch: branch.outcome * math.prod(branch.odds))
        for branch, (token, odds) in zip(grown, (yield from self._feed(grown)), strict=True):
            branch.chain.append(token)
            branch.odds.append(odds)
        self._growing = [branch for branch in self._growing if not self._is_complete(branch)]
        ready = complete + grown
        entries = tuple(
            Branch((*self._chain[: b.accepted], b.bonus), tuple(b.chain), self._alternatives(b), tuple(b.odds))
            for b in ready
        )
        q = self._tree.drawn_from([node for branch in ready for node in branch.nodes])
        return ReadyBranches(entries, not self.has_work, q)

    def learn(self, tokens: Sequence[int]) -> None:
        """Updates the calibration by the `tokens` that became final; called before the tree drops its nodes."""
        # The token after the accepted ones is the bonus token, or an alternative.
        accepted = common_prefix_length(self._chain, tokens[:-1])
        if accepted >= len(self._spine):
            return
        self._read_candidates(range(accepted + 1))
        known = [point for point in self._points[: accepted + 1] if point is not None]
        ChainAlternatives(self._chain, known).update_calibration(self._calibration, tokens)

    def _feed(self, grown: Sequence[GrowingBranch]) -> Steps[list[tuple[int, float]]]:
        """Feeds the rest of the chain and the next token of these branches. Returns the best continuation of each, with
        its odds."""
        unfed = () if self._is_forked else self._chain[len(self._spine) - 1 :]
        line = make_chain_feed(self._tree, self._spine[-1], unfed)
        parents = [*line.parents, *(b.nodes[-1] if b.nodes else self._spine[b.accepted] for b in grown)]
        tokens = [*line.tokens, *(None if b.nodes else b.bonus for b in grown)]
        if not tokens:
            return []
        depths = [*line.depths, *(self._depth - len(b.chain) for b in grown)]
        nodes = yield self._tree, TreeFeed(parents, tokens, depths)
        self._spine += nodes[: len(unfed)]
        tips = nodes[len(unfed) :]
        for branch, node in zip(grown, tips, strict=True):
            branch.nodes.append(node)
        return next_tokens(self._tree, tips, self._calibration)

    def _fork(self) -> list[GrowingBranch]:
        """Begins branches at the fork points that have been fed; returns those that are complete."""
        ready = range(self._forked, len(self._spine))
        if not ready:
            return []
        self._forked = len(self._spine)
        self._read_candidates(ready)
        stop_probs = stop_probabilities(self._points, self._calibration)
        begun: list[GrowingBranch] = []
        for k in ready:
            point, granted = self._points[k], self._ranks[k]
            for rank, bonus in islice(enumerate(point.others), granted.start, granted.stop) if point else ():
                share = self._calibration.bonus_probability(k == len(self._chain), rank, point)
                begun.append(GrowingBranch(k, bonus, stop_probs[k] * share))
                self._reuse_nodes(begun[-1])
        self._growing += [branch for branch in begun if not self._is_complete(branch)]
        return [branch for branch in begun if self._is_complete(branch)]

    def _is_complete(self, branch: GrowingBranch) -> bool:
        """Whether the branch has all its tokens: nothing is verified after an end token."""
        return len(branch.chain) == self._depth or (bool(branch.chain) and branch.chain[-1] in self._eos)

    def _read_candidates(self, points: Sequence[int]) -> None:
        """Reads the drafter's unknown candidates at these fork points, without the chain's own token and EOS."""
        unread = [k for k in points if self._points[k] is None]
        if not unread:
            return
        count = max(self._task.rank_offset + self._task.branches, MAX_RANK) + 1 + len(self._eos)
        ranked = self._tree.candidates([self._spine[k] for k in unread], count)
        for k, candidates in zip(unread, ranked, strict=True):
            own = self._chain[k] if k < len(self._chain) else None  # it can't be the bonus token after k tokens
            self._points[k] = ForkPoint.of(own, candidates, self._eos)

    def _reuse_nodes(self, branch: GrowingBranch) -> None:
        """Adds the branch's first tokens as far as they were fed in an earlier round."""
        node = find_child(self._tree, self._spine[branch.accepted], branch.bonus, given=True)
        while node is not None and not self._is_complete(branch):
            branch.nodes.append(node)
            token, odds = next_tokens(self._tree, [node], self._calibration)[0]
            branch.chain.append(token)
            branch.odds.append(odds)
            node = find_child(self._tree, node, token, given=False)

    def _alternatives(self, branch: GrowingBranch) -> Alternatives | None:
        """Returns those alternatives to a complete branch's tokens that are likely enough to pay."""
        threshold = self._task.min_prob
        if threshold >= 1.0 or self._tree.draws or not self._is_complete(branch):
            return None
        worth = count_worthwhile_positions(len(branch.chain), self._calibration, threshold)
        candidates = self._tree.candidates(branch.nodes[:worth], MAX_CHILDREN + len(self._eos))
        return ChainAlternatives.of(branch.chain, candidates).tree(self._calibration, threshold, self._eos).alternatives
