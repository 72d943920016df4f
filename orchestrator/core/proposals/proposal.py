"""What a round verifies, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile

from outrider.protocol.messages import Outcome
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import MAX_CHAIN, Origin
from outrider.protocol.trees import ROOT, DraftTree, SparseQ, depths, spine, united


class ProposalSource(Enum):
    """Where a chain under verification came from."""

    NONE = "none"
    CACHE = "cache"
    DRAFTER = "drafter"
    NGRAM = "ngram"
    HEAD = "head"


_ORIGINS = {ProposalSource.CACHE: Origin.PREPARED, ProposalSource.HEAD: Origin.HEAD}


class Lookup(Enum):
    """What the speculation cache had for the outcome before a round."""

    NONE = "none"
    """It was not asked."""
    HIT = "hit"
    """A branch, served at once."""
    GROWN = "grown"
    """A branch that was waited for to grow."""
    LATE = "late"
    """Nothing when the outcome came; its branch came while it was waited for."""
    MISS = "miss"

    @property
    def found(self) -> bool:
        """There was a branch, at once or late."""
        return self in (Lookup.HIT, Lookup.GROWN, Lookup.LATE)

    @property
    def missed(self) -> bool:
        """There was none when the outcome came."""
        return self in (Lookup.LATE, Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the next round verifies after the last committed token.

    The last `copied` tokens are from the text, those before may be a `drafter`'s. `q`: what the chain was drawn from,
    None where nothing was drawn. `autonomous`: the target goes on by itself after it, plainly or, `draft` tokens a
    round, with its own drafter, whose chain comes with the outcome; with tokens beside it that hold with a probability
    of more than `least`. With `draft` and without `autonomous` that is so for one round, and the tokens stand beside
    that chain. With `parents` the tokens are a tree; `by` tells where each is from, if not all are from one place.
    """

    chain: tuple[int, ...] = ()
    source: ProposalSource = ProposalSource.NONE
    lookup: Lookup = Lookup.NONE
    autonomous: bool = False
    copied: int = 0
    q: SparseQ | None = None
    draft: int = 0
    drafter: str = ""
    parents: tuple[int, ...] = ()
    by: tuple[Origin, ...] = ()
    least: float = 1.0

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or a tree's first branch."""
        return tuple(self.chain[node] for node in spine(self.parents)) if self.parents else self.chain

    @property
    def in_process(self) -> Sequence[int]:
        """The nodes of the drafter's chain."""
        if not self.by:
            return range(len(self.chain) - self.copied)
        return [node for node, origin in enumerate(self.by) if origin is self.origin]

    @property
    def depth(self) -> int:
        """How many tokens may hold at most."""
        return max(depths(self.parents), default=-1) + 1 if self.parents else len(self.chain)

    def nodes(self, outcome: Outcome) -> Sequence[int] | None:
        """Those that hold; None: the outcome is of no such proposal."""
        if outcome.path is None and not self.parents:
            return range(outcome.accepted) if outcome.accepted <= len(self.chain) else None
        path = tuple(range(outcome.accepted)) if outcome.path is None else outcome.path
        if len(path) != outcome.accepted or max(path, default=ROOT) >= len(self.parents):
            return None
        return path if [self.parents[node] for node in path] == [ROOT, *path][: len(path)] else None

    def along(self, nodes: Sequence[int]) -> int:
        """How many of these nodes that hold are of the drafter's chain."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(nodes, self.in_process, strict=False)))

    def settled(self, outcome: Outcome) -> Proposal:
        """With what was verified, which only the target knew where it drafted: that, and what was told beside it."""
        if not self.draft:
            return self
        own = DraftTree(outcome.drafted or (), outcome.drafted_parents)
        first = set(spine(own.parents)) if own.parents else range(len(own.tokens))
        by = tuple(self.origin if node in first else Origin.GUESSED for node in range(len(own.tokens)))
        if not self.chain:
            return replace(self, chain=own.tokens, parents=own.parents, by=by if own.parents else ())
        both = united(own, DraftTree(self.chain, self.parents), MAX_CHAIN)
        beside = {place: origin for place, origin in zip(both.places, self.by, strict=True) if place is not None}
        by += tuple(beside[node] for node in range(len(own.tokens), len(both.tokens)))
        return replace(self, chain=both.tokens, parents=both.parents, by=by)

    def again(self) -> Proposal:
        """The round after, which the target makes by itself."""
        return replace(self, chain=(), parents=(), by=(), lookup=Lookup.NONE)

    @property
    def origin(self) -> Origin:
        """Of what a drafter has said of it."""
        return _ORIGINS.get(self.source, Origin.DRAFTED)

    def origins(self, nodes: Sequence[int]) -> tuple[Origin, ...]:
        """Of the tokens of an outcome of which these nodes hold."""
        by = self.by or (self.origin,) * (len(self.chain) - self.copied) + (Origin.COPIED,) * self.copied
        return (*(by[node] for node in nodes), Origin.TARGET)

    def after_wait(self, missed: bool) -> Proposal:
        """Now that a drafter was waited for; `missed`: for a branch that was not there when the outcome came."""
        if missed:
            return replace(self, lookup=Lookup.LATE if self.lookup.found else Lookup.MISS)
        return replace(self, lookup=Lookup.GROWN) if self.lookup is Lookup.HIT else self

    def kind(self, sampling: SamplingParams) -> str:
        """By which rule the target is to verify it (see `Verify`)."""
        if not sampling.is_residual:
            return "coupled"
        return "one-hot" if self.q is None else "sparse"
