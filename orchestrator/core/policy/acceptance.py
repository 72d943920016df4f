"""How often the tokens of a chain hold, and the averages by which it is learned.

`Average`: numbers that follow what is seen: an average and a slope, both forgetting slowly. Knows no units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SMOOTHING = 0.1
FADE = 0.99
# A prior slope counts like points that are spread by so much (the sum of squares).
PRIOR_SPREAD = 32.0


class Average:
    """An exponential moving average that starts with its first value."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self.value: float | None = None
        self._smoothing = smoothing

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._smoothing * (value - self.value)


class Slope:
    """How much y grows with x, by least squares; old points fade. Noise that moves all points alike averages out."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n, self._x, self._y = FADE * self._n + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y

    def value(self, prior: float) -> float:
        """Near `prior` until points that differ in x say otherwise."""
        count = max(self._n, 1.0)
        spread = self._xx - self._x**2 / count
        together = self._xy - self._x * self._y / count
        return (together + PRIOR_SPREAD * prior) / (spread + PRIOR_SPREAD)


PRIOR_WEIGHT = 8.0
PRIOR_ACCEPTANCE = 0.7
# In one text what is believed of its kind counts like so many chains that broke.
PRIOR_BREAKS = 3.0
MAX_POSITIONS = 64
# Nothing holds more seldom than this, whatever was seen, nor breaks more seldom.
SELDOM = 0.02


class Acceptance:
    """How often chain token i held, given that those before it did.

    The first `positions` are told apart, but for the last of them, which stands for all that follow.
    """

    def __init__(
        self,
        prior: float | Acceptance = PRIOR_ACCEPTANCE,
        weight: float = PRIOR_WEIGHT,
        positions: int = MAX_POSITIONS,
        fade: float = FADE,
    ) -> None:
        self.prior, self._weight, self._fade = prior, weight, fade
        self._tried = [0.0] * positions
        self._held = [0.0] * positions

    def add(self, chain_length: int, accepted: int) -> None:
        for index in range(min(accepted + 1, chain_length)):
            position = min(index, len(self._tried) - 1)
            self._tried[position] = self._fade * self._tried[position] + 1.0
            self._held[position] = self._fade * self._held[position] + float(index < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Takes these for what `PRIOR_WEIGHT` rounds showed."""
        for position, rate in enumerate(rates[: len(self._tried)]):
            self._tried[position], self._held[position] = PRIOR_WEIGHT, PRIOR_WEIGHT * rate

    def known(self) -> tuple[float, ...]:
        """The rates of the positions that were seen."""
        seen = next((i for i, tried in enumerate(self._tried) if not tried), len(self._tried))
        return tuple(self.rate(position) for position in range(seen))

    def rate(self, position: int) -> float:
        position = min(position, len(self._tried) - 1)
        held = self._held[position] + self._weight * self._believed(position)
        return held / (self._tried[position] + self._weight)

    def _believed(self, position: int) -> float:
        """Before anything was seen."""
        return self.prior.rate(position) if isinstance(self.prior, Acceptance) else self.prior

    def likelihood(self, chain_length: int, accepted: int) -> float:
        """The logarithm of the chance that so many tokens of a chain hold, and no more."""
        rates = [min(max(self.rate(place), SELDOM), 1.0 - SELDOM) for place in range(min(accepted + 1, chain_length))]
        broke = math.log(1.0 - rates[accepted]) if accepted < chain_length else 0.0
        return broke + sum(map(math.log, rates[:accepted]))

    def reach(self, position: int) -> float:
        """Probability that chain token `position` and all before it hold."""
        return math.prod(self.rate(i) for i in range(position + 1))

    def expected_tokens(self, chain_length: int) -> float:
        """E[tokens] of a round with a chain of this length, the bonus token included."""
        reach = total = 1.0
        for position in range(chain_length):
            reach *= self.rate(position)
            total += reach
        return total


class Shifted(Acceptance):
    """How often tokens hold in one text: as `prior` says, but that all places break so many times as often as there.

    A text is hard or easy as a whole, so a few chains show it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._broke = self._expected = PRIOR_BREAKS

    def add(self, chain_length: int, accepted: int) -> None:
        self._expected += sum(1.0 - self._believed(place) for place in range(min(accepted + 1, chain_length)))
        self._broke += float(accepted < chain_length)

    def rate(self, position: int) -> float:
        return max(1.0 - (1.0 - self._believed(position)) * self._broke / self._expected, 0.0)
