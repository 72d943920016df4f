"""One request's work ahead, with nobody to share a forward with."""

from __future__ import annotations

from outrider.drafting.continuation import Continuation
from outrider.drafting.growth import Ready
from outrider.drafting.replay import ReplayDrafter, Script
from outrider.drafting.together import Together
from outrider.drafting.work_ahead import WorkAhead
from outrider.protocol.errors import OutriderError

# Trees are fed one by one whatever the drafter, where there is one.
_ALONE = Together(ReplayDrafter(Script((), (1.0,), (), 64)))


def advanced(work: WorkAhead) -> Ready | None:
    (found,) = _ALONE.advance([work])
    if isinstance(found, OutriderError):
        raise found
    return found


def continued(work: WorkAhead, depth: int) -> Continuation:
    (found,) = _ALONE.continuations([work], [depth])
    if isinstance(found, OutriderError):
        raise found
    return found
