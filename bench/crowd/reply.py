"""One request as its client saw it: when it was sent, and when which tokens came.

A token's time is the wait for its chunk, shared by the chunk's tokens; a gap is the wait itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.contest.statistics import Timed


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk of so many tokens reached the client, seconds on the clock of `Reply.sent`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished request: at least one arrival. `token_ids`, `text` and `reason` where whoever asked kept them;
    `cancelled` when the client left before the end."""

    sent: float
    arrivals: tuple[Arrival, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: str = ""
    cancelled: bool = False

    @property
    def first_ms(self) -> float:
        """From sending to the first token."""
        return 1000 * (self.arrivals[0].at - self.sent)

    @property
    def ended(self) -> float:
        return self.arrivals[-1].at

    @property
    def gaps_ms(self) -> list[float]:
        """Between one chunk and the next."""
        return [1000 * (after.at - before.at) for before, after in pairwise(self.arrivals)]

    @property
    def token_ms(self) -> list[float]:
        """The time of each token after the first chunk."""
        counts = [arrival.tokens for arrival in self.arrivals[1:]]
        return [gap / count for gap, count in zip(self.gaps_ms, counts, strict=True) for _ in range(count)]


def timed(replies: Sequence[Reply]) -> Timed:
    """All tokens of requests that ran together, over the time from the first one's sending to the last one's end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))
