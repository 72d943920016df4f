"""What the front has counted since the start: requests by their ends, tokens, and the sum of all timings."""

from __future__ import annotations

from collections import Counter

from outrider.orchestrator.front import totals
from outrider.protocol.messages import Done, Failed, Timings
from outrider.protocol.tallies import Tally


class Books:
    """One server's. `tokens`: made so far, for requests that still run, too."""

    def __init__(self) -> None:
        self.totals = Timings()
        self.tokens = 0
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    @property
    def finished(self) -> int:
        return self._done.total()

    @property
    def failed(self) -> int:
        return self._failed.total()

    def ended(self, last: Done | Failed) -> None:
        """A request's last word."""
        if isinstance(last, Done):
            self._done[last.reason] += 1
            self.totals = totals.add(self.totals, last.timings)
        else:
            self._failed[last.kind] += 1

    def endings(self) -> tuple[Tally, ...]:
        """By reason, or by kind of error."""
        return tuple(Tally(how, count) for how, count in (*list(self._done.items()), *list(self._failed.items())))
