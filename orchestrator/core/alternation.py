"""Alternation (MineDraft, arXiv 2603.18016): the target verifies one half of the requests, the other is drafted for.

Left alone, requests whose outcomes come together are drafted for together and verified together: the target waits for
the drafter, then the drafter for the target. Held apart, each half's chains are drafted, from exact features where a
head reads them, while the other half is verified. That pays where two forwards over half the rows, or a draft and one
of them, take less than a draft and one forward over all. Pure of time and messages.
"""

from __future__ import annotations

from collections.abc import Collection

from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.request import Request

# It has to be so much quicker by the estimates, which know nothing of the hop between two halves.
CLEARLY = 0.9


class Alternation:
    """Of SD's requests, by the two sides that they are on."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def side(self, requests: Collection[Request]) -> int:
        """Where a new one goes: to the fewer."""
        return int(2 * sum(request.side for request in requests) < len(requests))

    def holds(self, request: Request, requests: Collection[Request]) -> bool:
        """Whether a chain that has come waits until the other side's verify has ended."""
        mine = [other for other in requests if _takes_turns(other)]
        under_way = any(other.side != request.side and _is_verified(other) for other in mine)
        return under_way and _takes_turns(request) and self.pays(len(mine), request.depth)

    def pays(self, requests: int, depth: int) -> bool:
        """Whether so many requests with chains of `depth` take less time in two halves than together."""
        estimates, rows = self._estimates, depth + 1
        if requests < 2 or not estimates.has_drafted:
            return False
        draft, larger = estimates.draft_ms(depth), (requests + 1) // 2
        first, second = estimates.forward_ms(larger * rows), estimates.forward_ms((requests - larger) * rows)
        together = draft + estimates.forward_ms(requests * rows)
        return max(first + second, draft + first) < CLEARLY * together


def _takes_turns(request: Request) -> bool:
    return request.mode == "sd" and bool(request.drafters)


def _is_verified(request: Request) -> bool:
    """Whether the target has a round of it, other than its prompt."""
    return not (request.waiting or request.reads or request.over)
