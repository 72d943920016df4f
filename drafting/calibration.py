"""What past rounds taught: how often a chain token holds, and where the bonus token was found among the candidates.

Both depend on how sure the drafter was, so both are counted by *gap*: by how much the token chosen beats the next, or a
candidate lies below the first. Counts only; knows nothing of branches or budgets. Old rounds fade.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_RANK = 8
FADE = 0.998
# What a rank beyond the counted ones is worth, as a share of the one before it.
BEYOND = 0.8

# Bucket borders of gaps, nats. Between two of them acceptance changes by about ten points on the embedded pair.
GAPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
BUCKETS = len(GAPS) + 1

# Until rounds have been seen, this many of a typical pair's stand for them (measured, docs/log.md).
PRIOR_ROUNDS = 4.0


@dataclass(frozen=True, slots=True)
class Point:
    """A fork point: what the drafter thinks may follow k accepted tokens.

    `own_gap`: by how much the chain's own next token beats the best other; None after the whole chain. `gaps`: of the
    candidates for the bonus token, best first, each below the drafter's best.
    """

    own_gap: float | None
    gaps: tuple[float, ...]

    def below_first(self, rank: int) -> float:
        """How far candidate `rank` lies below the first candidate."""
        return self.gaps[rank] - self.gaps[0]


class Share:
    """How often something happened out of how often it could have, with a prior."""

    def __init__(self, prior: float) -> None:
        self._happened = PRIOR_ROUNDS * prior
        self._tried = PRIOR_ROUNDS

    def add(self, happened: bool) -> None:
        self._happened = self._happened * FADE + happened
        self._tried = self._tried * FADE + 1.0

    @property
    def value(self) -> float:
        return self._happened / self._tried


class Calibration:
    """Live estimates behind the fan-out."""

    def __init__(self) -> None:
        middles = [0.12, *((a + b) / 2 for a, b in pairwise(GAPS)), 12.0]
        self._accepted = [Share(1.0 - 0.6 * math.exp(-gap / 1.5)) for gap in middles]
        self._by_position: list[Share] = []
        self._by_gap = {
            full: [[Share(_prior_share(full, rank, gap)) for gap in middles] for rank in range(MAX_RANK)]
            for full in (False, True)
        }
        self._by_rank = {
            full: [Share(_prior_share(full, rank, 0.5 + 0.5 * rank)) for rank in range(MAX_RANK)]
            for full in (False, True)
        }

    def learn(self, points: Sequence[Point], chain_length: int, accepted: int, rank: int | None) -> None:
        """One outcome: `accepted` of `chain_length` held, and the bonus stood at `rank` among the candidates there.

        `points` are those of 0..accepted, the last of them unless the chain was not thought beyond; a rank of None:
        beyond the candidates.
        """
        while len(self._by_position) < chain_length:
            self._by_position.append(Share(0.75))
        for position in range(min(accepted + 1, chain_length)):
            gap = points[position].own_gap
            self._by_position[position].add(position < accepted)
            if gap is not None:
                self._accepted[bisect(GAPS, gap)].add(position < accepted)
        if accepted == len(points):
            return
        full, point = accepted == chain_length, points[accepted]
        for candidate in range(min(len(point.gaps), MAX_RANK)):
            self._by_rank[full][candidate].add(candidate == rank)
            bucket = bisect(GAPS, point.below_first(candidate))
            self._by_gap[full][candidate][bucket].add(candidate == rank)

    def acceptance(self, position: int, gap: float | None = None) -> float:
        """Probability that chain token `position` holds, given that all before it held; better with its gap."""
        if gap is not None:
            return self._accepted[bisect(GAPS, gap)].value
        return self._by_position[position].value if position < len(self._by_position) else 0.75

    def bonus_share(self, full: bool, rank: int, point: Point | None = None) -> float:
        """Probability that the bonus is candidate number `rank`, the chain's own token left out."""
        rank_known = min(rank, MAX_RANK - 1)
        if point is None:
            return self._by_rank[full][rank_known].value * BEYOND ** (rank - rank_known)
        share = self._by_gap[full][rank_known][bisect(GAPS, point.below_first(rank))]
        return share.value * BEYOND ** (rank - rank_known)


def _prior_share(full: bool, rank: int, gap: float) -> float:
    first = 0.8 if full else 0.5
    return first if rank == 0 else 0.4 * math.exp(-gap) / rank
