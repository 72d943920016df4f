"""Numbers with their uncertainty: medians, ratios of rates, bootstrap intervals. Pure; draws from a fixed seed."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 2000
NESTED_RESAMPLES = 300
SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens made in a time."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def total_rate(runs: Sequence[Timed]) -> float:
    """Tokens per second over all runs together."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def median_rate(runs: Sequence[Timed]) -> float:
    return statistics.median(run.rate for run in runs)


def ratio(ours: Sequence[Timed], theirs: Sequence[Timed]) -> Interval:
    """Our rate over theirs on the same prompts, in the same order; prompts are what is resampled."""
    pairs = list(zip(ours, theirs, strict=True))

    def of(chosen: Sequence[tuple[Timed, Timed]]) -> float:
        return total_rate([pair[0] for pair in chosen]) / total_rate([pair[1] for pair in chosen])

    return bootstrap(pairs, of)


def bootstrap(values: Sequence[T], estimate: Callable[[Sequence[T]], float]) -> Interval:
    """The estimate on all values, and the middle 95 % of what it is on values drawn again with replacement."""
    draw = random.Random(SEED)
    return _middle(estimate(values), [estimate(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)])


def nested_bootstrap(
    rounds: Sequence[Sequence[Sequence[float]]], estimate: Callable[[Sequence[float]], float]
) -> Interval:
    """The same of the numbers of all requests of all rounds: rounds are drawn again, and in each its requests."""
    draw = random.Random(SEED)

    def drawn_again() -> list[float]:
        requests = [r for chosen in draw.choices(rounds, k=len(rounds)) for r in draw.choices(chosen, k=len(chosen))]
        return [number for request in requests for number in request]

    everything = [number for requests in rounds for request in requests for number in request]
    return _middle(estimate(everything), [estimate(drawn_again()) for _ in range(NESTED_RESAMPLES)])


def _middle(value: float, found: Sequence[float]) -> Interval:
    ordered = sorted(found)
    return Interval(value, ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))])


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that occurred before in the same text: near 1, the text goes round in circles."""
    counts = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    total = sum(counts.values())
    return (total - len(counts)) / total if total else 0.0
