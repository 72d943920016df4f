"""Which kind of engine a text is asked of, placed or attached: its session's own, else the one with the least to do.

An engine that was just lost counts as none for a while, and so do all of a kind of which none answered: a text that
goes on is not to wait for them. Counts; asks nobody.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

MISSED_SECONDS = 3.0


class EngineSelector:
    """Kinds are numbered; `many` engines are of each, about."""

    def __init__(self, many: Sequence[int], now: Callable[[], float] = time.monotonic) -> None:
        self._many = many
        self._now = now
        self._under_way = [0] * len(many)
        self._lost: list[dict[Hashable, float]] = [{} for _ in many]
        self._silent = [0.0] * len(many)

    def choose(self, session: str) -> int:
        """The kind for a text; the same for a session, at all gates, while it has engines."""
        there = [self._there(kind) for kind in range(len(self._many))]
        if not any(there):
            there = list(self._many)
        if session:
            kind = _by_name(session, self._many)
            return kind if there[kind] else _by_name(session, there)
        kinds = [kind for kind, many in enumerate(there) if many]
        return min(kinds, key=lambda kind: self._under_way[kind] / there[kind])

    @contextmanager
    def under_way(self, kind: int) -> Iterator[None]:
        """As long as a text is asked there."""
        self._under_way[kind] += 1
        try:
            yield
        finally:
            self._under_way[kind] -= 1

    def lost(self, kind: int, engine: Hashable) -> None:
        """That one is gone."""
        self._lost[kind][engine] = self._now()

    def silent(self, kind: int) -> None:
        """None of these answers."""
        self._silent[kind] = self._now() + MISSED_SECONDS

    def _there(self, kind: int) -> int:
        """How many engines of a kind may be counted on."""
        since = self._now() - MISSED_SECONDS
        self._lost[kind] = {engine: at for engine, at in self._lost[kind].items() if at > since}
        return 0 if self._now() < self._silent[kind] else max(self._many[kind] - len(self._lost[kind]), 0)


def _by_name(session: str, many: Sequence[int]) -> int:
    """One of the kinds, each as likely as it has engines."""
    ends = list(accumulate(many))
    at = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8]) % ends[-1]
    return next(kind for kind, end in enumerate(ends) if at < end)
