"""A drafter's work for one request: which tokens to feed next, and which branches are ready to be pushed.

A commit makes tokens final: they are kept in the token tree, learned from, and fed if nobody drafted them; then the
branches of the chain that is verified next grow (`growth`). One `advance` is one forward of the drafter, so that its
caller can read messages between two. Knows nothing of sockets.

`begin` opens a request: the drafter reads its text, with drawn continuations where the request's sampling needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outrider.drafters.continuation import ChainAlternatives, Continuation
from outrider.drafters.drafter import (
    Drafter,
    DrafterFault,
    DrawingDrafter,
    DrawingTree,
    FeatureTree,
    TokenTree,
)
from outrider.drafters.fan_out import BranchRequest, Calibration, FanOut
from outrider.drafters.growth import BranchGrowth, BranchTask, Paths, ReadyBranches, Steps
from outrider.engine.tree_feed import TreeFeed
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Halves

_PIECE = 256  # committed tokens a forward, when there are too many to be fed beside the chain
_BESIDE = 16


class WorkAhead:
    """Prepares the likely outcomes of the chain under verification, all branches one token deeper a forward.

    Committed tokens that were not drafted wait until an `advance` feeds them: a few of them together with the chain,
    many (after a time without drafts) in pieces that are only read. They also wait while a tree that reads the target's
    rows can't grow yet.
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
        self._paths = Paths(tree, drawing)
        self._hearing = tree if isinstance(tree, FeatureTree) else None
        self._eos = frozenset(eos)
        self._fan_out = fan_out
        self._calibration = calibration
        self._growth: BranchGrowth | None = None
        self.said: ChainAlternatives | None = None
        self._behind: list[int] = []  # committed, and not yet fed
        self._wanted = BranchTask(None, 0)

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
        """True while a forward is worth making, or the answer that there is none has not been given."""
        if self._is_blind:
            return False
        return self._growth.busy if self._growth is not None else bool(self._behind)

    def commit(self, tokens: Sequence[int], wanted: BranchTask) -> None:
        """Makes `tokens` final, then plans the branches behind them.

        Nodes along that path are kept, all others are dropped. Near the end of the context branches get shorter, then
        none are prepared. Makes no forward: of several commits in a row only the last one costs work.
        """
        self._learn(tokens)
        self.said = None
        self._wanted = wanted
        if not self._behind and not self._is_blind:
            known = self._paths.committed(tokens)
            self.tree.commit(known)
            tokens = tokens[len(known) :]
        self._behind += tokens
        self._growth = None
        if not self._behind and not self._is_blind:
            self._begin_growth()

    def add_features(self, position: int, rows: Halves) -> None:
        """The target's rows of committed tokens, the first at `position`; ignored by trees that do not read them."""
        if self._hearing is None:
            return
        self._hearing.add_features(position, rows)
        if self._growth is None and not self._behind and not self._is_blind:
            self._begin_growth()

    @property
    def _is_blind(self) -> bool:
        """Whether nothing can grow or be read before more rows arrive."""
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
        for wanted in range(depth - 1, 0, -1):
            nodes += yield TreeFeed(nodes[-1:], [None], [wanted])
        chain = tuple(self.tree.best(nodes))
        if self._wanted.min_prob >= 1.0 or self._paths.are_drawn:
            return Continuation(chain, self._paths.drawn_from(nodes))
        self.said = ChainAlternatives(chain, self._paths.places(chain, nodes, len(self._eos)))
        return Continuation.of(self.said.tree(self._calibration, self._wanted.min_prob))

    def wish(self) -> BranchRequest | None:
        """The branches that it wants; None: it has its share, or wants none."""
        return self._growth.request() if self._growth is not None else None

    def grant(self, wish: BranchRequest, branches: int) -> None:
        """Shares `branches` out over the fork points of its wish."""
        if self._growth is not None:
            self._growth.grant(wish, branches)

    def advance(self) -> Steps[ReadyBranches | None]:
        """One forward, over committed tokens that are not fed yet or over all branches. A wish must be granted before.

        None: committed tokens were fed, and there is nothing to push.
        """
        if self._behind:
            yield from self._catch_up()
            return None
        if self._growth is None:
            return ReadyBranches((), 0, True)
        return (yield from self._growth.advance())

    def _catch_up(self) -> Steps[None]:
        """One forward over committed tokens; after the last of them, branches can be planned."""
        if self.far_behind or not self._has_root:
            piece, self._behind = self._behind[:_PIECE], self._behind[_PIECE:]
            self.tree.read(piece, more=len(self._behind) > _BESIDE)
        else:
            verifying = self._wanted.verifying
            line = [*self._behind, *(verifying or ())]
            nodes = yield self._paths.line(self.tree.root, line, self._wanted.depth if verifying is None else 1)
            self.tree.commit(nodes[: len(self._behind)])
            self._behind = []
        if not self._behind and self._has_root:
            self._begin_growth()

    def _begin_growth(self) -> None:
        """Begins the branches of the chain under verification."""
        wanted, eos = self._wanted, self._eos
        if wanted.verifying is not None:
            self._growth = BranchGrowth(self._paths, wanted.verifying, wanted, eos, self._fan_out, self._calibration)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Counts what became of proposals and branches, before the tree drops their nodes."""
        if self.said is not None and tokens:
            self.said.teach(self._calibration, tokens)
        if self._growth is not None and tokens:
            self._growth.learn(tokens)


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
    """Reads `tokens`. Continuations are drawn where residual sampling wants it and the drafter can.

    Args:
        cached: of how many continuations of a node Saguaro's factor lowers the weight.
        progress: called as (tokens done, tokens in all); may raise to end the call.
        constraint: what the text's grammar allows, so that nothing else is proposed.

    Raises:
        DrafterFault: the drafter can't have these tokens.
    """
    check_known(drafter, tokens)
    if len(tokens) >= drafter.context_length:
        raise DrafterFault(
            f"the text has {len(tokens)} tokens and the draft model's context is"
            f" {drafter.context_length}; drafting is off"
            " for this request"
        )
    if sampling.is_residual and isinstance(drafter, DrawingDrafter):
        drawing = drafter.open_drawing(tokens, sampling, cached, progress, constraint)
        return WorkAhead(drawing, eos, fan_out, calibration, drawing)
    return WorkAhead(drafter.open(tokens, sampling, progress, constraint), eos, fan_out, calibration)


def check_known(drafter: Drafter, tokens: Sequence[int]) -> None:
    """The target may have more tokens than the draft: padding, which only a random model produces.

    Raises:
        DrafterFault: one of these is such a token.
    """
    foreign = max(tokens, default=0)
    if foreign >= drafter.vocab_size:
        raise DrafterFault(
            f"token {foreign} is not among the draft's {drafter.vocab_size}; drafting is off from here on"
        )
