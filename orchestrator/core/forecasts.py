"""What a way of making rounds should bring, by the formula (`speedup`) and the live estimates; K and B are its best.

So many requests share each forward of the target, and the drafter: with them K and B become narrow by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.speedup import Costs, Odds, ar_rate, sd_rate, ssd_rate

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
BREADTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Plan:
    """How rounds are made: `mode` is ar, sd or ssd; `depth` is K, `branches` B."""

    mode: str
    depth: int
    branches: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """What there is to choose from: a mode that keeps to a tuned K and B, or, without a depth, follows the formula."""

    mode: str
    depth: int = 0
    branches: int = 0


Forecast = tuple[Plan, float]
"""A plan, and the tokens per millisecond that all requests bring under it."""


@dataclass
class Forecasts:
    """For `at_once` requests, K up to `max_depth`, B up to `branches`, or, `fixed`, just that."""

    estimates: Estimates
    at_once: int
    max_depth: int
    branches: int
    fixed: bool
    _tokens: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        deepest = max(self.max_depth, DEPTHS[-1])
        reach, self._tokens = 1.0, [1.0]
        for position in range(deepest):
            reach *= self.estimates.drafted.rate(position)
            self._tokens.append(self._tokens[-1] + reach)
        self._verify_ms = cache(self.estimates.forward_ms)

    def of(self, way: Way) -> Forecast:
        """The best plan of this way."""
        if way.mode == "ar":
            return Plan("ar", 1, self.branches), ar_rate(self._costs(1))
        depths = (
            [way.depth] if way.depth else [depth for depth in DEPTHS if depth <= self.max_depth] or [self.max_depth]
        )
        if way.mode == "sd":
            return self._best("sd", depths, [self.branches])
        return self._best("ssd", depths, [way.branches] if way.branches else self._breadths())

    def _breadths(self) -> list[int]:
        narrower = [] if self.fixed else [breadth for breadth in BREADTHS if breadth < self.branches]
        return [self.branches, *reversed(narrower)]

    def _best(self, mode: str, depths: Iterable[int], breadths: Iterable[int]) -> Forecast:
        found = []
        for breadth in breadths:
            costs, odds = self._costs(breadth), Odds(self._brings, self.estimates.covered(breadth))
            rate = sd_rate if mode == "sd" else ssd_rate
            found += [(Plan(mode, depth, breadth), rate(costs, odds, depth)) for depth in depths]
        return max(found, key=lambda forecast: forecast[1])

    def _brings(self, depth: int) -> float:
        while len(self._tokens) <= depth:  # a tuned K may be deeper than those asked for
            self._tokens.append(self._tokens[-1])
        return self._tokens[depth]

    def _costs(self, breadth: int) -> Costs:
        e, n = self.estimates, self.at_once
        depth_ms = e.trees_ms(n * max(breadth, 1))
        return Costs(
            e.plain_ms(n),
            self._verify_ms,
            e.chain_ms,
            lambda depth: (depth + 1) * depth_ms,
            e.turnaround_ms(),
            n,
        )
