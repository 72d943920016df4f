"""How much each peer of a socket may say: so much a second, with some in reserve for what comes at once.

What is beyond that is dropped before it is read, so that whoever floods a socket takes no time from the others. Knows
peers and sizes; knows nothing of what they say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.protocol.clock import SECOND_NS

BYTES = 16 * 1024
"""A message counts as one more for each of these."""
MOST_PEERS = 64
"""So many are not looked through for those that could be forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many messages a second, after as many at once as are in `reserve`."""

    a_second: float
    reserve: float


@dataclass(slots=True)
class _Level:
    left: float
    at_ns: int
    is_over: bool = False


class Allowance:
    """Of all peers of one socket alike."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._levels: dict[bytes, _Level] = {}
        self._most = MOST_PEERS

    def takes(self, peer: bytes, frames: Iterable[bytes | memoryview], now_ns: int) -> bool:
        """Whether the peer may say this much now."""
        level = self._level(peer, now_ns)
        cost = 1 + sum(map(len, frames)) / BYTES
        # What is larger than the reserve passes when that is full: a size has a limit of its own.
        if level.left < min(cost, self._rate.reserve):
            return False
        level.left -= cost
        return True

    def is_first(self, peer: bytes) -> bool:
        """Whether this refusal is the peer's first since it had all its reserve: the one to tell of."""
        level = self._levels[peer]
        level.is_over, was_over = True, level.is_over
        return not was_over

    def _level(self, peer: bytes, now_ns: int) -> _Level:
        level = self._levels.get(peer)
        if level is None:
            self._forget_idle(now_ns)
            level = self._levels[peer] = _Level(self._rate.reserve, now_ns)
        self._fill(level, now_ns)
        return level

    def _fill(self, level: _Level, now_ns: int) -> None:
        level.left = min(level.left + (now_ns - level.at_ns) / SECOND_NS * self._rate.a_second, self._rate.reserve)
        level.at_ns = now_ns
        if level.left == self._rate.reserve:
            level.is_over = False

    def _forget_idle(self, now_ns: int) -> None:
        """Who has all its reserve is as good as unknown. Looks through all only when they have doubled."""
        if len(self._levels) < self._most:
            return
        for peer, level in list(self._levels.items()):
            self._fill(level, now_ns)
            if level.left == self._rate.reserve:
                del self._levels[peer]
        self._most = max(2 * len(self._levels), MOST_PEERS)
