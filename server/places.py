"""How many answers each caller may be given at once. Counts; knows nothing of what the answers are."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from outrider.server.problems import Refused


class Places:
    """One server's; `most` None: as many as anybody likes."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    def take(self, caller: str) -> ExitStack:
        """A place that is the caller's until what is returned is closed.

        Raises:
            Refused: they have as many as they may.
        """
        if self._most is not None and self._taken[caller] >= self._most:
            raise Refused(
                f"{self._most} of your requests are running, the maximum (--max-streams-per-key); try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._taken[caller] += 1
        place = ExitStack()
        place.callback(self._leave, caller)
        return place

    def _leave(self, caller: str) -> None:
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
