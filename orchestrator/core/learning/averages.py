"""Numbers that follow what is seen: an average and a slope, both forgetting slowly. Knows no units."""

from __future__ import annotations

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
