"""A drafter's acceptance as a profile states it, and random outcomes of one text under it."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from outrider.drafters.fan_out import Calibration, ForkPoint
from tools.simulation.profile import Profile

UNRANKED = 1 << 16


@dataclass(frozen=True, slots=True)
class Luck:
    """Random outcomes of a text by position: the proposal is right if its draw is below the acceptance; otherwise
    the true token has this rank among the other candidates."""

    draws: tuple[float, ...]
    ranks: tuple[int, ...]

    @classmethod
    def drawn(cls, profile: Profile, length: int, seed: int) -> Luck:
        rng = random.Random(seed)
        draws = tuple(rng.random() for _ in range(length))
        return cls(draws, tuple(draw_ranks(profile, length, rng)))


def draw_ranks(profile: Profile, count: int, rng: random.Random) -> list[int]:
    """Draws ranks of true tokens by the profile's bonus ranks; `UNRANKED` beyond them."""
    borders = tuple(accumulate(profile.bonus_ranks))
    ranks = (bisect_right(borders, rng.random()) for _ in range(count))
    return [rank if rank < len(borders) else UNRANKED for rank in ranks]


class KnownOdds(Calibration):
    """The calibration of a drafter that knows the profile's probabilities."""

    def __init__(self, profile: Profile) -> None:
        self._right, self._ranks = profile.acceptance, profile.bonus_ranks

    def acceptance(self, position: int, gap: float | None = None) -> float:
        return self._right[min(position, len(self._right) - 1)]

    def bonus_probability(self, full: bool, rank: int, point: ForkPoint | None = None) -> float:
        if not full:
            return self._ranks[rank] if rank < len(self._ranks) else 0.0
        right = self._right[0]
        return right if rank == 0 else (1 - right) * self.bonus_probability(False, rank - 1)
