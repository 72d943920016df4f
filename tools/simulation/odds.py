"""The acceptance of a drafter as a profile states it, and random texts that have it."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from outrider.drafters.fan_out import Calibration, ForkPoint
from tools.simulation.profile import Profile

UNRANKED = 1 << 16


@dataclass(frozen=True, slots=True)
class TextDraws:
    """The random draws of a text by position. The drafter's proposal is right if the draw of `uniform` is below the
    acceptance; otherwise the true token has this rank among the other candidates."""

    uniform: tuple[float, ...]
    ranks: tuple[int, ...]

    @classmethod
    def draw(cls, profile: Profile, length: int, seed: int) -> TextDraws:
        rng = random.Random(seed)
        uniform = tuple(rng.random() for _ in range(length))
        return cls(uniform, tuple(draw_ranks(profile, length, rng)))


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
