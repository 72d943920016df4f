"""Chooses between placed and attached engines: a session keeps its kind, other requests go to the less busy kind.

Lost engines, and a kind of which none answered, do not count for a few seconds, so a text that continues elsewhere does
not wait for them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

LOST_ENGINE_SECONDS = 3.0


class EngineSelector:
    """Chooses a kind by its number. `engine_counts`: the approximate number of engines of each kind."""

    def __init__(self, engine_counts: Sequence[int], now: Callable[[], float] = time.monotonic) -> None:
        self._engine_counts = engine_counts
        self._now = now
        self._under_way = [0] * len(engine_counts)
        self._lost: list[dict[Hashable, float]] = [{} for _ in engine_counts]

    def choose(self, session: str) -> int:
        """Returns the kind for a text. Every ingress chooses the same for a session, while that kind has engines."""
        there = [self._available_engines(kind) for kind in range(len(self._engine_counts))]
        if not any(there):
            there = list(self._engine_counts)
        if session:
            kind = _choose_by_hash(session, self._engine_counts)
            return kind if there[kind] else _choose_by_hash(session, there)
        kinds = [kind for kind, many in enumerate(there) if many]
        return min(kinds, key=lambda kind: self._under_way[kind] / there[kind])

    @contextmanager
    def under_way(self, kind: int) -> Iterator[None]:
        """Counts a request in progress."""
        self._under_way[kind] += 1
        try:
            yield
        finally:
            self._under_way[kind] -= 1

    def mark_lost(self, kind: int, engine: Hashable) -> None:
        """Records that an engine is lost."""
        self._lost[kind][engine] = self._now()

    def mark_silent(self, kind: int) -> None:
        """Records that no engine of this kind answered: all of them are lost."""
        self._lost[kind] |= dict.fromkeys(range(self._engine_counts[kind]), self._now())

    def _available_engines(self, kind: int) -> int:
        """Returns how many engines of a kind are available."""
        since = self._now() - LOST_ENGINE_SECONDS
        self._lost[kind] = {engine: at for engine, at in self._lost[kind].items() if at > since}
        return max(self._engine_counts[kind] - len(self._lost[kind]), 0)


def _choose_by_hash(session: str, engine_counts: Sequence[int]) -> int:
    """Chooses a kind in proportion to its engines, in every process the same one for a session."""
    return random.Random(session).choices(range(len(engine_counts)), engine_counts)[0]
