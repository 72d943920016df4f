"""The drafter's work ahead for one request: which tokens to feed next, and what is ready to be pushed.

Works on a `TokenTree` and on commits; knows nothing of sockets. It yields what is to be fed, so that several requests
can share a forward (`drafting.together`). One `advance` is one forward of the drafter, so that its caller can look for
news between two. Paper sections 3 and 4; the words are docs/architecture.md's.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from outrider.drafting.beside import WIDTH, Place, with_others, worthwhile
from outrider.drafting.calibration import MAX_RANK, Calibration, Point
from outrider.drafting.drafter import DrawingTree, HearingTree, TokenTree, TreeFeed
from outrider.drafting.fan_out import FanOut, Wish, ranks
from outrider.protocol.fields import Halves
from outrider.protocol.messages import Beside, Branch
from outrider.protocol.sparse import SparseQ
from outrider.protocol.trees import DraftTree, spine

Result = TypeVar("Result")
Steps = Generator[TreeFeed, list[int], Result]
"""Work that yields what its tree is to be fed, and is sent the new nodes."""

_PIECE = 256  # committed tokens a forward, when there are too many to be fed beside the chain
_BESIDE = 16


@dataclass(slots=True)
class Growing:
    """A branch in the making: `tip` is its last fed node (None before the bonus token is fed), `chain` what follows.

    `nodes[i]` is the node that chain token i follows. `beside`: what was thought next best, once it is whole.
    """

    accepted: int
    bonus: int
    tip: int | None = None
    chain: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """What one forward brought: branches to push, as deep as they are, and whether that is all of the round.

    `q`: what the chains' tokens were drawn from, if they were.
    """

    entries: tuple[Branch, ...]
    depth: int
    final: bool
    q: SparseQ | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows the committed text, and what it was drawn from, if it was.

    With `parents` its tokens are a tree (`protocol.trees`), its first branch what the drafter would say as a chain.
    `odds`: of each token, that it holds where the one before it does; (): the drafter does not say.
    """

    chain: tuple[int, ...] = ()
    q: SparseQ | None = None
    parents: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.chain, self.parents, self.odds)

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or the tree's first branch."""
        return tuple(self.chain[node] for node in spine(self.parents)) if self.parents else self.chain

    @property
    def beside(self) -> Beside | None:
        """Of a tree whose first branch comes first what stands beside that."""
        count = len(spine(self.parents))
        return Beside(self.chain[count:], self.parents[count:], self.odds[count:]) if self.parents else None


@dataclass(frozen=True, slots=True)
class Thought:
    """The bonus tokens that may follow at a fork point, best first, and how they compare."""

    bonuses: tuple[int, ...]
    point: Point


@dataclass(slots=True)
class Plan:
    """The work for one chain under verification.

    `spine[k]` is the node after which the outcome (k, t) places its bonus token t: the root, then the chain's nodes as
    far as they are fed; `unfed` is the rest of the chain. `thoughts[k]` are what the drafter would place there, None
    until that was looked at. `ranks[k]` are those that get a branch, `branches` in all behind the `skip` likeliest;
    `unforked` are the k whose branches are not begun.
    """

    chain: tuple[int, ...]
    spine: list[int]
    depth: int
    branches: int
    skip: int
    thoughts: list[Thought | None]
    ranks: list[range] = field(default_factory=list)
    unfed: tuple[int, ...] = ()
    unforked: list[int] = field(default_factory=list)
    growing: list[Growing] = field(default_factory=list)
    found: list[Growing] = field(default_factory=list)
    begun: bool = False

    def own(self, k: int) -> int | None:
        """The chain's token after `k` accepted ones: it cannot be that outcome's bonus."""
        return self.chain[k] if k < len(self.chain) else None


@dataclass(frozen=True, slots=True)
class Said:
    """A continuation, and what was thought at each of its places."""

    chain: tuple[int, ...]
    places: Sequence[Place]

    def teach(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """What became final instead."""
        accepted = _common(self.chain, tokens[:-1])
        points = [place.point for place in self.places[: accepted + 1]]
        others = self.places[accepted].others if accepted < len(self.places) else ()
        calibration.learn(points, len(self.chain), accepted, _rank(others, tokens[accepted]))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a commit asks for: `branches` outcomes of the chain `verifying`, `depth` deep; with None, nothing.

    The `skip` likeliest are other drafters'. `least`: how probable tokens are that are told beside a chain's.
    """

    verifying: tuple[int, ...] | None
    depth: int
    branches: int
    skip: int = 0
    least: float = 1.0


class WorkAhead:
    """Prepares the likely outcomes of the chain under verification, all branches one token deeper a forward.

    Committed tokens that nobody drafted wait until an `advance` feeds them: after a few beside the chain, after a
    stretch without drafts in pieces that are only read. So they do while a tree that is to be told rows can't grow yet.
    """

    def __init__(
        self,
        tree: TokenTree,
        eos: Collection[int],
        fan_out: FanOut,
        calibration: Calibration,
        drawing: DrawingTree | None = None,
    ) -> None:
        """`drawing`: `tree` itself, where its continuations are drawn."""
        self.tree = tree
        self._drawing = drawing
        self._hearing = tree if isinstance(tree, HearingTree) else None
        self._eos = frozenset(eos)
        self._fan_out = fan_out
        self._calibration = calibration
        self._plan: Plan | None = None
        self.said: Said | None = None
        self._behind: list[int] = []  # committed, and not yet fed
        self._wanted = Wanted(None, 0, 0)

    @property
    def committed_len(self) -> int:
        """Number of committed tokens, those that wait to be fed included."""
        return self.tree.committed_len + len(self._behind)

    @property
    def far_behind(self) -> bool:
        """True while a continuation would first have to feed many tokens: `advance` does so piece by piece."""
        return len(self._behind) > _BESIDE and not self._is_blind

    @property
    def busy(self) -> bool:
        """True while there is a forward worth making, or it is still to be said that there is none."""
        plan = self._plan
        if self._is_blind:
            return False
        if plan is None:
            return bool(self._behind)
        return bool(not plan.begun or plan.unfed or plan.unforked or plan.growing)

    def commit(
        self,
        tokens: Sequence[int],
        verifying: Sequence[int] | None,
        depth: int,
        branches: int,
        skip: int = 0,
        least: float = 1.0,
    ) -> None:
        """Makes `tokens` final, then plans the outcomes of the chain `verifying`: `branches` of them, `depth` deep.

        They are those behind the `skip` likeliest, which others prepare. Beside the tokens of chains others are told
        that hold with a probability of more than `least`.
        What was drafted along that path is kept, all else is dropped. Near the end of the context branches get shorter,
        then none are prepared. `verifying` None plans nothing. Makes no forward: of several commits in a row only the
        last one's work is done.
        """
        self._learn(tokens)
        self.said = None
        self._wanted = Wanted(None if verifying is None else tuple(verifying), depth, branches, skip, least)
        if not self._behind and not self._is_blind:
            known = self._known(tokens)
            self.tree.commit(known)
            tokens = tokens[len(known) :]
        self._behind += tokens
        self._plan = None
        if not self._behind and not self._is_blind:
            self._make_plan()

    def hear(self, position: int, rows: Halves) -> None:
        """The target's rows of committed tokens, the first at `position`; only a tree of what reads them is told."""
        if self._hearing is None:
            return
        self._hearing.hear(position, rows)
        if self._plan is None and not self._behind and not self._is_blind:
            self._make_plan()

    @property
    def _is_blind(self) -> bool:
        """Whether nothing can grow or be read, for rows are to come first."""
        return self._hearing is not None and not self._hearing.ready(len(self._behind))

    @property
    def _has_root(self) -> bool:
        return self._hearing is None or self._hearing.ready()

    def continuation(self, depth: int) -> Steps[Continuation]:
        """The `depth` tokens that follow the committed text, chained on the device and evaluated once (SD)."""
        while self._behind and not self._is_blind:
            yield from self._catch_up()
        if not self._has_root:
            return Continuation()
        depth = min(depth, self.tree.room)
        if depth < 1:
            return Continuation()
        nodes = [self.tree.root]
        for _ in range(depth - 1):
            nodes += yield TreeFeed(nodes[-1:], [None])
        chain = tuple(self.tree.best(nodes))
        if not self._tells_others:
            return Continuation(chain, self._drawn_from(nodes))
        places = self._places(chain, nodes)
        self.said = Said(chain, places)
        tree = with_others(chain, places, self._calibration, self._wanted.least)
        return Continuation(tree.tokens, None, tree.parents, tree.odds)

    @property
    def _tells_others(self) -> bool:
        return self._wanted.least < 1.0 and self._drawing is None

    def _places(self, chain: Sequence[int], nodes: Sequence[int]) -> list[Place]:
        """What is thought at each place of a chain; `nodes[i]` is the one that its token i follows."""
        found = self.tree.candidates(nodes, WIDTH + len(self._eos))
        return [Place.of(token, candidates) for token, candidates in zip(chain, found, strict=True)]

    def _beside(self, growing: Growing) -> Beside | None:
        """What is thought next best beside a whole branch's tokens, where that may pay at all."""
        chain = growing.chain[: min(len(growing.nodes), self._wanted.depth)]
        worth = worthwhile(len(chain), self._calibration, self._wanted.least)
        if not worth:
            return None
        places = self._places(chain[:worth], growing.nodes[:worth])
        tree = with_others(chain, places, self._calibration, self._wanted.least)
        return Continuation(tree.tokens, None, tree.parents, tree.odds).beside

    def wish(self) -> Wish | None:
        """How many branches the new plan wants, and where; None: it has its share, or wants none."""
        plan = self._plan
        if self._behind or plan is None or plan.ranks or not plan.unforked:
            return None
        self._look(plan, [k for k in plan.unforked if k < len(plan.spine)])
        points = [thought.point if thought else None for thought in plan.thoughts]
        return Wish(points, plan.branches, plan.depth, plan.skip)

    def grant(self, wish: Wish, branches: int) -> None:
        """Shares `branches` out over the fork points of its wish."""
        if self._plan is not None:
            self._plan.ranks = ranks(wish, branches, self._fan_out, self._calibration)

    def advance(self) -> Steps[Ready | None]:
        """One forward: what the chain still lacks is fed, every branch grows one token, new forks begin.

        A wish is to be granted before. None: committed tokens were fed, which brings nothing to push.
        """
        if self._behind:
            yield from self._catch_up()
            return None
        plan = self._plan
        if plan is None:
            return Ready((), 0, True)
        plan.begun = True
        self._fork(plan)
        grown = plan.growing
        for growing, token in zip(grown, (yield from self._feed(plan)), strict=True):
            growing.chain.append(token)
        plan.growing = [growing for growing in grown if len(growing.chain) < plan.depth]
        moved, plan.found = plan.found + grown, []
        for growing in moved if self._tells_others else ():
            if len(growing.chain) >= plan.depth:
                growing.beside = self._beside(growing)
        entries = tuple(
            Branch((*plan.chain[: g.accepted], g.bonus), tuple(g.chain[: plan.depth]), g.beside) for g in moved
        )
        q = self._drawn_from([node for g in moved for node in g.nodes[: plan.depth]])
        return Ready(entries, max((len(entry.chain) for entry in entries), default=0), not self.busy, q)

    def _catch_up(self) -> Steps[None]:
        """One forward over committed tokens; once there are no more, what is wanted can be planned."""
        if self.far_behind or not self._has_root:
            piece, self._behind = self._behind[:_PIECE], self._behind[_PIECE:]
            self.tree.read(piece, more=len(self._behind) > _BESIDE)
        else:
            line = [*self._behind, *(self._wanted.verifying or ())]
            nodes = yield _line(self.tree, self.tree.root, line)
            self.tree.commit(nodes[: len(self._behind)])
            self._behind = []
        if not self._behind and self._has_root:
            self._make_plan()

    def _make_plan(self) -> None:
        chain = self._wanted.verifying
        if chain is None:
            return
        known = self._walk(self.tree.root, chain)
        wanted, depth = self._wanted, min(self._wanted.depth, self.tree.room - len(chain) - 1)
        thoughts: list[Thought | None] = [None] * (len(chain) + 1)
        plan = self._plan = Plan(chain, [self.tree.root, *known], depth, wanted.branches, wanted.skip, thoughts)
        if depth > 0 and wanted.branches > 0:
            plan.unfed = chain[len(known) :]
            plan.unforked = list(range(len(chain) + 1))

    def _feed(self, plan: Plan) -> Steps[list[int]]:
        """The forward of `advance`: the unfed chain, and every growing branch's next token. Returns the bests."""
        line = _line(self.tree, plan.spine[-1], plan.unfed)
        parents = [*line.parents, *(plan.spine[g.accepted] if g.tip is None else g.tip for g in plan.growing)]
        tokens = [*line.tokens, *(g.bonus if g.tip is None else None for g in plan.growing)]
        if not tokens:
            return []
        nodes, fed = (yield TreeFeed(parents, tokens)), len(plan.unfed)
        plan.unfed = ()
        plan.spine += nodes[:fed]
        for growing, node in zip(plan.growing, nodes[fed:], strict=True):
            growing.tip = node
            growing.nodes.append(node)
        return self.tree.best(nodes)[fed:]

    def _fork(self, plan: Plan) -> None:
        """Starts branches wherever the chain has been fed."""
        ready = [k for k in plan.unforked if k < len(plan.spine)]
        plan.unforked = plan.unforked[len(ready) :]
        self._look(plan, [k for k in ready if plan.thoughts[k] is None])
        for k in ready:
            thought = plan.thoughts[k]
            wanted = plan.ranks[k]
            for bonus in thought.bonuses[wanted.start : wanted.stop] if thought else ():
                self._begin(plan, k, bonus)

    def _look(self, plan: Plan, points: Sequence[int]) -> None:
        """What the drafter thinks at these fork points: never the chain's own token, never EOS."""
        if not points:
            return
        wide = max(plan.skip + plan.branches, MAX_RANK) + 1 + len(self._eos)
        found = self.tree.candidates([plan.spine[k] for k in points], wide)
        for k, candidates in zip(points, found, strict=True):
            own = plan.own(k)
            others = [c for c in candidates if c.token != own and c.token not in self._eos]
            gaps = tuple(c.gap for c in others)
            own_gap = None
            if own is not None and others:
                own_gap = gaps[0] - next((c.gap for c in candidates if c.token == own), gaps[-1])
            plan.thoughts[k] = Thought(tuple(c.token for c in others), Point(own_gap, gaps))

    def _begin(self, plan: Plan, accepted: int, bonus: int) -> None:
        """A new branch; where an earlier round already fed its first tokens, they are taken over."""
        growing = Growing(accepted, bonus, self._child(plan.spine[accepted], bonus, told=True))
        node = growing.tip
        while node is not None:
            growing.tip = node
            growing.nodes.append(node)
            growing.chain += self.tree.best([node])
            node = self._child(node, growing.chain[-1], told=False)
        (plan.growing if len(growing.chain) < plan.depth else plan.found).append(growing)

    def _drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        return self._drawing.drawn_from(nodes) if self._drawing is not None else None

    def _child(self, node: int, token: int, told: bool) -> int | None:
        """The fed node for `token` right after `node`. Of drawn chains only one that noise of the right place follows.

        A chain begins with a token that was told. Had it been drawn itself, what follows it would be drawn by noise of
        an earlier place, which a chain under verification may have been drawn by too.
        """
        if self._drawing is None:
            return self.tree.child(node, token)
        return self._drawing.child(node, token, told)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along committed `tokens`; the last of them is to be one that a chain may begin with."""
        path = self._walk(self.tree.root, tokens[:-1])
        if tokens and len(path) == len(tokens) - 1:
            last = self._child((path or [self.tree.root])[-1], tokens[-1], told=True)
            path += [last] if last is not None else []
        return path

    def _walk(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along `tokens` from `node`, as far as they go."""
        path: list[int] = []
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _learn(self, tokens: Sequence[int]) -> None:
        """Counts what the outcome (k, t) of the prepared chain was, before the tree forgets it."""
        if self.said is not None and tokens:
            self.said.teach(self._calibration, tokens)
        plan = self._plan
        if plan is None or not tokens:
            return
        accepted = _common(plan.chain, tokens[:-1])  # what follows is the bonus, or a token beside the chain
        if accepted >= len(plan.spine):
            return
        unseen = [k for k in range(accepted + 1) if plan.thoughts[k] is None]
        if unseen:
            self._look(plan, unseen)
        thoughts = [thought for thought in plan.thoughts[: accepted + 1] if thought is not None]
        rank = _rank(thoughts[accepted].bonuses, tokens[accepted])
        self._calibration.learn([thought.point for thought in thoughts], len(plan.chain), accepted, rank)


def _common(chain: Sequence[int], tokens: Sequence[int]) -> int:
    """With how many of the same tokens both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chain, tokens, strict=False)))


def _rank(tokens: Sequence[int], token: int) -> int | None:
    return tokens.index(token) if token in tokens else None


def _line(tree: TokenTree, node: int, tokens: Sequence[int]) -> TreeFeed:
    """`tokens` one behind the other, the first behind `node`."""
    return TreeFeed([node, *range(tree.next_node, tree.next_node + len(tokens) - 1)][: len(tokens)], tokens)
