"""The branches of one chain under verification: which outcomes get one, and how each forward makes all a token deeper.

Paper, sections 3 and 4. Works on one tree, and on the nodes that earlier rounds left there. `Paths` follows tokens
through a tree, so that nothing is fed twice. Work is a generator (`Steps`) that yields wherever it needs a forward, so
that several requests can share one (`draft_batcher`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.drafters.continuation import (
    WIDTH,
    AlternativesAt,
    Continuation,
    common,
    rank,
    with_alternatives,
    worthwhile,
)
from outrider.drafters.drafter import DrawingTree, TokenTree
from outrider.drafters.fan_out import MAX_RANK, BranchRequest, Calibration, FanOut, ForkPoint, ranks
from outrider.engine.tree_feed import TreeFeed
from outrider.protocol.messages import Alternatives, Branch
from outrider.protocol.trees import SparseQ


class Paths:
    """Paths through `tree`; `drawing`: the same, where its continuations are drawn."""

    def __init__(self, tree: TokenTree, drawing: DrawingTree | None = None) -> None:
        self.tree = tree
        self._drawing = drawing

    @property
    def are_drawn(self) -> bool:
        return self._drawing is not None

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        """The distributions that the tokens after these nodes were drawn from, if they were drawn."""
        return self._drawing.drawn_from(nodes) if self._drawing is not None else None

    def child(self, node: int, token: int, told: bool) -> int | None:
        """The fed node for `token` right after `node`. Of drawn chains only one that noise of the right place follows.

        A chain begins with a token that was told. Had it been drawn itself, what follows it would be drawn by noise of
        an earlier place, which a chain under verification may have been drawn by too.
        """
        if self._drawing is None:
            return self.tree.child(node, token)
        return self._drawing.child(node, token, told)

    def along(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along `tokens` from `node`, as far as they go."""
        path: list[int] = []
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def committed(self, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along committed `tokens`; a chain can begin at the last of them."""
        path = self.along(self.tree.root, tokens[:-1])
        if tokens and len(path) == len(tokens) - 1:
            last = self.child((path or [self.tree.root])[-1], tokens[-1], told=True)
            path += [last] if last is not None else []
        return path

    def line(self, node: int, tokens: Sequence[int], wanted: int = 1) -> TreeFeed:
        """Feeds `tokens` in a row, the first behind `node`. `wanted`: how many more will follow the last."""
        following = range(self.tree.next_node, self.tree.next_node + len(tokens) - 1)
        return TreeFeed([node, *following][: len(tokens)], tokens, [*[1] * len(tokens[1:]), wanted][: len(tokens)])

    def places(self, chain: Sequence[int], nodes: Sequence[int], ends: int) -> list[AlternativesAt]:
        """The alternatives at each place of a chain; `nodes[i]` is the node that its token i follows.

        `ends`: so many tokens may be told that nothing follows.
        """
        found = self.tree.candidates(nodes, WIDTH + ends)
        return [AlternativesAt.of(token, candidates) for token, candidates in zip(chain, found, strict=True)]


Result = TypeVar("Result")
Steps = Generator[TreeFeed, list[int], Result]
"""Yields what to feed its tree, and is sent the new nodes."""


@dataclass(frozen=True, slots=True)
class BranchTask:
    """A commit's request: `branches` outcomes of the chain `verifying` (None: none of them), `depth` deep.

    The `rank_offset` likeliest outcomes belong to other drafters. Branches also name tokens beside the chain's that
    hold with a probability above `min_prob`.
    """

    verifying: tuple[int, ...] | None
    depth: int
    branches: int = 0
    rank_offset: int = 0
    min_prob: float = 1.0


@dataclass(frozen=True, slots=True)
class ReadyBranches:
    """The result of one forward: branches to push at their current depth, and whether the round is complete.

    `q`: what the chains' tokens were drawn from, if they were.
    """

    entries: tuple[Branch, ...]
    depth: int
    final: bool
    q: SparseQ | None = None


@dataclass(slots=True)
class GrowingBranch:
    """A branch in the making: `tip` is its last fed node (None before the bonus token is fed), `chain` what follows.

    `nodes[i]` is the node that chain token i follows. `alternatives`: what was thought next best, once it is whole.
    """

    accepted: int
    bonus: int
    tip: int | None = None
    chain: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    alternatives: Alternatives | None = None


class BranchGrowth:
    """The work for one chain.

    `_spine[k]` is the node after which the outcome (k, t) places its bonus token t: the root, then the chain's nodes as
    far as they are fed; `_unfed` is the rest of the chain. `_candidates[k]` are what the drafter would place there,
    None until that was looked at. `_ranks[k]` are those that get a branch, `_unforked` the k whose branches are not
    begun.
    """

    def __init__(
        self,
        paths: Paths,
        chain: tuple[int, ...],
        wanted: BranchTask,
        eos: Collection[int],
        fan_out: FanOut,
        calibration: Calibration,
    ) -> None:
        known = paths.along(paths.tree.root, chain)
        self._paths, self._tree = paths, paths.tree
        self._chain, self._wanted, self._eos = chain, wanted, eos
        self._fan_out, self._calibration = fan_out, calibration
        self._depth = min(wanted.depth, self._tree.room - len(chain) - 1)
        self._spine = [self._tree.root, *known]
        self._candidates: list[AlternativesAt | None] = [None] * (len(chain) + 1)
        self._ranks: list[range] = []
        self._growing: list[GrowingBranch] = []
        self._found: list[GrowingBranch] = []
        self._begun = False
        grows = self._depth > 0 and wanted.branches > 0
        self._unfed = chain[len(known) :] if grows else ()
        self._unforked = list(range(len(chain) + 1)) if grows else []

    @property
    def busy(self) -> bool:
        """True while a forward is worth making, or the answer that there is none has not been given."""
        return bool(not self._begun or self._unfed or self._unforked or self._growing)

    def request(self) -> BranchRequest | None:
        """The branches that it wants; None: it has its share, or wants none."""
        if self._ranks or not self._unforked:
            return None
        self._look([k for k in self._unforked if k < len(self._spine)])
        points = [thought.point if thought else None for thought in self._candidates]
        return BranchRequest(points, self._wanted.branches, self._depth, self._wanted.rank_offset)

    def grant(self, wish: BranchRequest, branches: int) -> None:
        """Shares `branches` out over the fork points of its wish."""
        self._ranks = ranks(wish, branches, self._fan_out, self._calibration)

    def advance(self) -> Steps[ReadyBranches]:
        """One forward: what the chain still lacks is fed, every branch grows one token, new forks begin."""
        self._begun = True
        self._fork()
        grown = self._growing
        for growing, token in zip(grown, (yield from self._feed()), strict=True):
            growing.chain.append(token)
        self._growing = [growing for growing in grown if len(growing.chain) < self._depth]
        moved, self._found = self._found + grown, []
        for growing in moved if self._wanted.min_prob < 1.0 and not self._paths.are_drawn else ():
            if len(growing.chain) >= self._depth:
                growing.alternatives = self._alternatives(growing)
        entries = tuple(
            Branch((*self._chain[: g.accepted], g.bonus), tuple(g.chain[: self._depth]), g.alternatives) for g in moved
        )
        q = self._paths.drawn_from([node for g in moved for node in g.nodes[: self._depth]])
        return ReadyBranches(entries, max((len(entry.chain) for entry in entries), default=0), not self.busy, q)

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts its outcome, by the `tokens` that became final, before the tree drops its nodes."""
        accepted = common(self._chain, tokens[:-1])  # what follows is the bonus, or a token beside the chain
        if accepted >= len(self._spine):
            return
        unseen = [k for k in range(accepted + 1) if self._candidates[k] is None]
        if unseen:
            self._look(unseen)
        thoughts = [thought for thought in self._candidates[: accepted + 1] if thought is not None]
        stood = rank(thoughts[accepted].others, tokens[accepted])
        self._calibration.learn([thought.point for thought in thoughts], len(self._chain), accepted, stood)

    def _feed(self) -> Steps[list[int]]:
        """The forward: the unfed chain, and every growing branch's next token. Returns each branch's best."""
        line = self._paths.line(self._spine[-1], self._unfed)
        parents = [*line.parents, *(self._spine[g.accepted] if g.tip is None else g.tip for g in self._growing)]
        tokens = [*line.tokens, *(g.bonus if g.tip is None else None for g in self._growing)]
        if not tokens:
            return []
        wanted = [*line.wanted, *(self._depth - len(g.chain) for g in self._growing)]
        nodes, fed = (yield TreeFeed(parents, tokens, wanted)), len(self._unfed)
        self._unfed = ()
        self._spine += nodes[:fed]
        for growing, node in zip(self._growing, nodes[fed:], strict=True):
            growing.tip = node
            growing.nodes.append(node)
        return self._tree.best(nodes)[fed:]

    def _fork(self) -> None:
        """Starts branches wherever the chain has been fed."""
        ready = [k for k in self._unforked if k < len(self._spine)]
        self._unforked = self._unforked[len(ready) :]
        self._look([k for k in ready if self._candidates[k] is None])
        for k in ready:
            thought, wanted = self._candidates[k], self._ranks[k]
            for bonus in thought.others[wanted.start : wanted.stop] if thought else ():
                self._begin(k, bonus)

    def _look(self, points: Sequence[int]) -> None:
        """Reads the drafter's candidates at these fork points, without the chain's own token and EOS."""
        if not points:
            return
        wide = max(self._wanted.rank_offset + self._wanted.branches, MAX_RANK) + 1 + len(self._eos)
        found = self._tree.candidates([self._spine[k] for k in points], wide)
        for k, candidates in zip(points, found, strict=True):
            own = self._chain[k] if k < len(self._chain) else None  # it cannot be that outcome's bonus
            others = [c for c in candidates if c.token != own and c.token not in self._eos]
            gaps = tuple(c.gap for c in others)
            own_gap = None
            if own is not None and others:
                own_gap = gaps[0] - next((c.gap for c in candidates if c.token == own), gaps[-1])
            self._candidates[k] = AlternativesAt(tuple(c.token for c in others), ForkPoint(own_gap, gaps))

    def _begin(self, accepted: int, bonus: int) -> None:
        """A new branch; its first tokens may have been fed in an earlier round."""
        growing = GrowingBranch(accepted, bonus, self._paths.child(self._spine[accepted], bonus, told=True))
        node = growing.tip
        while node is not None:
            growing.tip = node
            growing.nodes.append(node)
            growing.chain += self._tree.best([node])
            node = self._paths.child(node, growing.chain[-1], told=False)
        (self._growing if len(growing.chain) < self._depth else self._found).append(growing)

    def _alternatives(self, growing: GrowingBranch) -> Alternatives | None:
        """The next best tokens beside those of a complete branch, where they may pay at all."""
        chain, least = growing.chain[: min(len(growing.nodes), self._wanted.depth)], self._wanted.min_prob
        worth = worthwhile(len(chain), self._calibration, least)
        if not worth:
            return None
        places = self._paths.places(chain[:worth], growing.nodes[:worth], len(self._eos))
        return Continuation.of(with_alternatives(chain, places, self._calibration, least)).alternatives
