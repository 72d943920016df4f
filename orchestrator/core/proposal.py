"""What a round verifies, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from outrider.protocol.messages import Outcome
from outrider.protocol.origins import Origin
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import SparseQ


class Source(Enum):
    """Where a chain under verification came from."""

    NONE = "none"
    CACHE = "cache"
    DRAFTER = "drafter"
    NGRAM = "ngram"


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
    None where nothing was drawn. `going_on`: the target goes on by itself after it, plainly or, `draft` tokens a round,
    with its own drafter, whose chain comes with the outcome.
    """

    chain: tuple[int, ...] = ()
    source: Source = Source.NONE
    lookup: Lookup = Lookup.NONE
    going_on: bool = False
    copied: int = 0
    q: SparseQ | None = None
    draft: int = 0
    drafter: str = ""

    def settled(self, outcome: Outcome) -> Proposal:
        """With the chain that was verified, which only the target knew if it drafted for itself."""
        return replace(self, chain=outcome.drafted or ()) if self.draft else self

    def again(self) -> Proposal:
        """The round after, which the target makes by itself."""
        return replace(self, chain=(), lookup=Lookup.NONE)

    def origins(self, accepted: int) -> tuple[Origin, ...]:
        """Of the tokens of an outcome that accepted so many of the chain."""
        drafted = Origin.PREPARED if self.source is Source.CACHE else Origin.DRAFTED
        chain = (drafted,) * (len(self.chain) - self.copied) + (Origin.COPIED,) * self.copied
        return (*chain[:accepted], Origin.TARGET)

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
