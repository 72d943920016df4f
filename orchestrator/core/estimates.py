"""Live estimates of what things cost and how often they succeed; milliseconds and probabilities.

Fed with measured spans and outcomes by the rounds; read by the fallback and the controller. Takes no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.orchestrator.core.tuning import Tuning

SMOOTHING = 0.1
PRIOR_WEIGHT = 8.0
PRIOR_ACCEPTANCE = 0.7
# Of tokens copied from the text, by how many before them matched.
PRIOR_COPIED = (0.3, 0.3, 0.45, 0.55, 0.65, 0.75)
PRIOR_HIT_RATE = 0.8
FADE = 0.99
# How well copies hold changes from text to text, and with the temperature: few positions and a short memory follow.
COPY_WEIGHT = 2.0
COPY_FADE = 0.95
# The least variance of rows that tells what a row costs.
MIN_SPREAD = 0.5
# Until measured: a row more costs a tenth of the first.
COST_PER_ROW = 0.1
MAX_POSITIONS = 64


class Average:
    """An exponential moving average that starts with its first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + SMOOTHING * (value - self.value)


class Slope:
    """How much y grows with x, by least squares; old points fade. Noise that moves all points alike averages out."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n, self._x, self._y = FADE * self._n + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y

    @property
    def value(self) -> float | None:
        """None until the points differ enough in x."""
        spread = self._n * self._xx - self._x**2
        if spread <= MIN_SPREAD * self._n**2:
            return None
        return (self._n * self._xy - self._x * self._y) / spread


class Acceptance:
    """How often chain token i held, given that those before it did.

    The first `positions` are told apart, but for the last of them, which stands for all that follow.
    """

    def __init__(
        self,
        prior: float = PRIOR_ACCEPTANCE,
        weight: float = PRIOR_WEIGHT,
        positions: int = MAX_POSITIONS,
        fade: float = FADE,
    ) -> None:
        self._prior, self._weight, self._fade = prior, weight, fade
        self._tried = [0.0] * positions
        self._held = [0.0] * positions

    def add(self, chain_length: int, accepted: int) -> None:
        for index in range(min(accepted + 1, chain_length)):
            position = min(index, len(self._tried) - 1)
            self._tried[position] = self._fade * self._tried[position] + 1.0
            self._held[position] = self._fade * self._held[position] + float(index < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Takes these for what `PRIOR_WEIGHT` rounds showed."""
        for position, rate in enumerate(rates[:MAX_POSITIONS]):
            self._tried[position], self._held[position] = PRIOR_WEIGHT, PRIOR_WEIGHT * rate

    def rate(self, position: int) -> float:
        position = min(position, len(self._tried) - 1)
        return (self._held[position] + self._weight * self._prior) / (self._tried[position] + self._weight)

    def reach(self, position: int) -> float:
        """Probability that chain token `position` and all before it hold."""
        return math.prod(self.rate(i) for i in range(position + 1))

    def expected_tokens(self, chain_length: int) -> float:
        """E[tokens] of a round with a chain of this length, the bonus token included."""
        return 1.0 + sum(self.reach(position) for position in range(chain_length))


class Estimates:
    """What the orchestrator believes about its workers and the text, all requests of one load together."""

    def __init__(self, text: Estimates | None = None) -> None:
        """`text`: estimates whose odds of the text and of the pair hold here too; costs are this load's own."""
        self._verify_ms: dict[int, Average] = {}
        self._row_ms = Slope()
        self._step_ms = Average()
        self._depth_ms = Average()
        self._link_ms = Average()
        self._round_tokens = Average()
        self._round_ms = Average()
        self._ar_ms = Average()
        self._hits = Average()
        self._turnaround_ms = Average()
        self.drafted: Acceptance = Acceptance() if text is None else text.drafted
        copied = [Acceptance(prior, COPY_WEIGHT, positions=2, fade=COPY_FADE) for prior in PRIOR_COPIED]
        self._copied: list[Acceptance] = copied if text is None else text._copied

    def start_from(self, tuning: Tuning) -> None:
        """Takes a tuning's measurements for first values."""
        for rows, milliseconds in tuning.verify_ms:
            self.saw_verify(rows, milliseconds)
        self._ar_ms.add(tuning.step_ms)
        self._step_ms.add(tuning.draft_ms)
        self._depth_ms.add(tuning.depth_ms)
        self._link_ms.add(tuning.link_ms)
        self._turnaround_ms.add(tuning.turnaround_ms)
        self._hits.add(tuning.hit_rate)
        self.drafted.start_from(tuning.acceptance)

    def saw_verify(self, rows: int, milliseconds: float) -> None:
        self._verify_ms.setdefault(rows, Average()).add(milliseconds)
        self._row_ms.add(rows, milliseconds)

    def saw_draft(self, tokens: int, milliseconds: float) -> None:
        """A chain of `tokens` drafted in one go."""
        self._step_ms.add(milliseconds / max(tokens, 1))

    def saw_depth(self, milliseconds: float) -> None:
        """All branches one token deeper."""
        self._depth_ms.add(milliseconds)

    def saw_chain(self, drafted: int, accepted: int, copied: int = 0, matched: int = 0) -> None:
        """A verified chain of `drafted` tokens from a drafter and then `copied` ones, for which so many had matched."""
        self.drafted.add(drafted, min(accepted, drafted))
        if copied and accepted >= drafted:
            self.copied(matched).add(copied, accepted - drafted)

    def copied(self, matched: int) -> Acceptance:
        """How well tokens hold that followed so many matching ones before."""
        return self._copied[min(matched, len(self._copied) - 1)]

    def saw_link(self, milliseconds: float) -> None:
        """What asking the drafter cost beyond its own work."""
        self._link_ms.add(milliseconds)

    def saw_round(self, tokens: int, milliseconds: float) -> None:
        self._round_tokens.add(tokens)
        self._round_ms.add(milliseconds)

    def saw_ar(self, milliseconds: float) -> None:
        """From one token of plain decoding to the next."""
        self._ar_ms.add(milliseconds)

    def saw_lookup(self, hit: bool) -> None:
        self._hits.add(float(hit))

    def saw_turnaround(self, milliseconds: float) -> None:
        """The target's wait between an outcome and the verify of a hit."""
        self._turnaround_ms.add(milliseconds)

    def ar_ms(self) -> float:
        """A token of plain decoding in the target, one step pipelined."""
        return self._ar_ms.value if self._ar_ms.value is not None else self.verify_ms(1)

    def hit_rate(self) -> float:
        return self._hits.value if self._hits.value is not None else PRIOR_HIT_RATE

    def turnaround_ms(self) -> float:
        return self._turnaround_ms.value if self._turnaround_ms.value is not None else 0.3

    def row_ms(self) -> float:
        """What one row more adds to a verify."""
        usual, measured = COST_PER_ROW * self.verify_ms(1), self._row_ms.value
        return usual if measured is None else min(max(measured, 0.0), self.verify_ms(1))

    def verify_ms(self, rows: int) -> float:
        """c(M): measured for this many rows, else from the nearest measured by `COST_PER_ROW`."""
        known = self._verify_ms.get(rows)
        if known is not None and known.value is not None:
            return known.value
        nearest = min(self._verify_ms, key=lambda m: abs(m - rows), default=None)
        if nearest is None:
            return 10.0
        return (
            (self._verify_ms[nearest].value or 10.0)
            * (1 + COST_PER_ROW * (rows - 1))
            / (1 + COST_PER_ROW * (nearest - 1))
        )

    @property
    def has_drafted(self) -> bool:
        """Whether a drafter has ever answered."""
        return self._step_ms.value is not None

    def draft_ms(self, tokens: int) -> float:
        """Asking a drafter for a chain of `tokens` and having it."""
        step = self._step_ms.value if self._step_ms.value is not None else self.depth_ms()
        return tokens * step + self.link_ms()

    def link_ms(self) -> float:
        """There and back between here and a drafter."""
        return self._link_ms.value if self._link_ms.value is not None else 0.5

    def depth_ms(self) -> float:
        return self._depth_ms.value if self._depth_ms.value is not None else 3.0

    def tokens_per_ms(self) -> float:
        """The rate at which tokens have been coming; what a millisecond of waiting costs."""
        tokens, milliseconds = self._round_tokens.value, self._round_ms.value
        return tokens / milliseconds if tokens and milliseconds else 1.0 / self.verify_ms(1)
