"""One request's work ahead, with nobody to share a forward with."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.growth import Continuation, ReadyBranches
from outrider.drafters.heads.drafter import HeadDraft
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead, run_together
from outrider.protocol.errors import OutriderError

# Trees are fed one by one whatever the drafter, where there is one.
_ALONE = DraftBatcher()


def advanced(work: WorkAhead) -> ReadyBranches | None:
    (found,) = _ALONE.advance([work])
    if isinstance(found, OutriderError):
        raise found
    return found


def continued(work: WorkAhead, depth: int) -> Continuation:
    (found,) = continuations([work], [depth])
    if isinstance(found, OutriderError):
        raise found
    return found


def continuations(drafts: Sequence[WorkAhead | HeadDraft], depths: Sequence[int]) -> list[Continuation | OutriderError]:
    """The drafts of several texts of one drafter, whose trees share forwards."""
    return run_together([draft.continuation(depth) for draft, depth in zip(drafts, depths, strict=True)])[0]
