"""A drafter in the target's process: draft, then verify, without a hop between, for a machine with one device.

The drafter is one of `drafting`, as in a process of its own. It can't work ahead here: draft and target take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.drafting.begin import begin, check_known
from outrider.drafting.calibration import Calibration
from outrider.drafting.drafter import Drafter, DrafterFault
from outrider.drafting.fan_out import POLICIES
from outrider.drafting.together import Together
from outrider.drafting.work_ahead import Continuation, WorkAhead
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Colocated:
    """The drafter beside the target."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def open(self, tokens: Sequence[int], sampling: SamplingParams, progress: Progress | None = None) -> OwnDraft:
        """Reads `tokens` for a request; `progress(done, total)` may raise to end that."""
        return OwnDraft(self.drafter, tokens, sampling, progress)


class OwnDraft:
    """What the drafter knows of one request. Follows the committed tokens whenever it is asked to propose."""

    def __init__(
        self, drafter: Drafter, tokens: Sequence[int], sampling: SamplingParams, progress: Progress | None
    ) -> None:
        self._drafter, self._together = drafter, Together(drafter)
        self._work: WorkAhead | None = None
        # Nothing is prepared for ahead of its time, so there are no tokens whose weight Saguaro's factor would lower.
        even = replace(sampling, saguaro=1.0) if sampling.is_residual else sampling
        try:
            self._work = begin(drafter, tokens, even, (), POLICIES["uniform"], Calibration(), progress=progress)
        except DrafterFault as error:
            log.warning("%s", error)

    def propose(self, tokens: Sequence[int], depth: int) -> Continuation:
        """Up to `depth` tokens after the committed `tokens`, which begin with those of the call before.

        The chain ends with the draft's context, and is empty from there on.
        """
        work = self._work
        if work is None:
            return Continuation()
        new = tokens[work.committed_len :]
        try:
            check_known(self._drafter, new)
        except DrafterFault as error:
            log.warning("%s", error)
            self.close(spoilt=False)
            return Continuation()
        if len(tokens) >= self._drafter.context_length:
            self.close(spoilt=False)
            return Continuation()
        work.commit(new, None, depth, 0)
        (found,) = self._together.continuations([work], [depth])
        if isinstance(found, OutriderError):
            raise found
        return found

    def close(self, spoilt: bool) -> None:
        """It drafts no more; what it has read may serve later texts, unless it is spoilt."""
        work, self._work = self._work, None
        if work is not None:
            work.tree.close(spoilt)

    def column_tokens(self) -> list[int]:
        """The token of every committed KV column, in order; must equal the committed tokens."""
        return self._work.tree.column_tokens() if self._work is not None else []
