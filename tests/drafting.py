"""Drafts ahead for one request, or a few of the same drafter, without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.growth import Continuation, ReadyBranches, Steps
from outrider.drafters.heads.drafter import HeadDraft
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead, run_together
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import InProcess

# One batcher for all tests: it runs a single request alone, whatever its drafter is.
_BATCHER = DraftBatcher()


def advance(work: WorkAhead) -> ReadyBranches | None:
    """Runs one step of the work. Raises the error if it fails."""
    (found,) = _BATCHER.advance([work])
    if isinstance(found, OutriderError):
        raise found
    return found


def draft_chain(work: WorkAhead, depth: int) -> Continuation:
    """Drafts `depth` tokens after the committed text. Raises the error if it fails."""
    (found,) = draft_chains([work], [depth])
    if isinstance(found, OutriderError):
        raise found
    return found


@dataclass(frozen=True, slots=True)
class HeadText:
    """The committed text that a head in the target's process continues."""

    draft: HeadDraft
    tokens: Sequence[int]
    min_prob: float = 1.0

    def continuation(self, depth: int) -> Steps[Continuation]:
        return self.draft.turn(self.tokens, InProcess(depth, min_prob=self.min_prob)).steps


def draft_chains(drafts: Sequence[WorkAhead | HeadText], depths: Sequence[int]) -> list[Continuation | OutriderError]:
    """Drafts `depths[n]` tokens for each request of one drafter. The requests share forwards."""
    return run_together([draft.continuation(depth) for draft, depth in zip(drafts, depths, strict=True)])[0]
