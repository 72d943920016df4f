"""What a round verifies, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from outrider.protocol.messages import Outcome
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import SparseQ


class Source(Enum):
    """Where a chain under verification came from."""

    NONE = "none"
    CACHE = "cache"
    DRAFTER = "drafter"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the next round verifies after the last committed token.

    `found`: there was a branch for the outcome. `missed`: there was none when the outcome came; both: it came late.
    `waited`: a drafter was waited for. The last `copied` tokens are from the text, which had been in the same place by
    `matched` tokens before. `q`: what the chain was drawn from, None where nothing was drawn. `going_on`: the target
    goes on by itself after it, plainly or, `draft` tokens a round, with its own drafter, whose chain comes with the
    outcome.
    """

    chain: tuple[int, ...] = ()
    source: Source = Source.NONE
    going_on: bool = False
    found: bool = False
    missed: bool = False
    waited: bool = False
    copied: int = 0
    matched: int = 0
    q: SparseQ | None = None
    draft: int = 0

    def settled(self, outcome: Outcome) -> Proposal:
        """With the chain that was verified, which only the target knew if it drafted for itself."""
        return replace(self, chain=outcome.drafted or ()) if self.draft else self

    def again(self) -> Proposal:
        """The round after, which the target makes by itself."""
        return replace(self, chain=(), missed=False, waited=False)

    def kind(self, sampling: SamplingParams) -> str:
        """By which rule the target is to verify it (see `Verify`)."""
        if not sampling.is_residual:
            return "coupled"
        return "one-hot" if self.q is None else "sparse"
