"""One request's work ahead, with nobody to share a forward with."""

from __future__ import annotations

from outrider.drafters.growth import Continuation, ReadyBranches
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead
from outrider.protocol.errors import OutriderError

# Trees are fed one by one whatever the drafter, where there is one.
_ALONE = DraftBatcher()


def advanced(work: WorkAhead) -> ReadyBranches | None:
    (found,) = _ALONE.advance([work])
    if isinstance(found, OutriderError):
        raise found
    return found


def continued(work: WorkAhead, depth: int) -> Continuation:
    (found,) = _ALONE.continuations([work], [depth])
    if isinstance(found, OutriderError):
        raise found
    return found
