"""Live estimates of what things cost and how often they succeed; milliseconds and probabilities.

Fed with measured spans and outcomes by the rounds; read by the fallback and the controller. Takes no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.core.tuning import Tuning

SMOOTHING = 0.1
PRIOR_WEIGHT = 8.0
PRIOR_ACCEPTANCE = 0.7
PRIOR_HIT_RATE = 0.8
# Until measured: a row more costs a tenth of the first.
COST_PER_ROW = 0.1
MAX_POSITIONS = 64


class Average:
    """An exponential moving average that starts with its first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + SMOOTHING * (value - self.value)


class Acceptance:
    """How often chain token i held, given that those before it did."""

    def __init__(self) -> None:
        self._tried = [0.0] * MAX_POSITIONS
        self._held = [0.0] * MAX_POSITIONS

    def add(self, chain_length: int, accepted: int) -> None:
        for position in range(min(accepted + 1, chain_length)):
            self._tried[position] = 0.99 * self._tried[position] + 1.0
            self._held[position] = 0.99 * self._held[position] + float(position < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Takes these for what `PRIOR_WEIGHT` rounds showed."""
        for position, rate in enumerate(rates[:MAX_POSITIONS]):
            self._tried[position], self._held[position] = PRIOR_WEIGHT, PRIOR_WEIGHT * rate

    def rate(self, position: int) -> float:
        position = min(position, MAX_POSITIONS - 1)
        return (self._held[position] + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (self._tried[position] + PRIOR_WEIGHT)

    def reach(self, position: int) -> float:
        """Probability that chain token `position` and all before it hold."""
        return math.prod(self.rate(i) for i in range(position + 1))

    def expected_tokens(self, chain_length: int) -> float:
        """E[tokens] of a round with a chain of this length, the bonus token included."""
        return 1.0 + sum(self.reach(position) for position in range(chain_length))


class Estimates:
    """What the orchestrator believes about its workers and the text, all requests together."""

    def __init__(self) -> None:
        self._verify_ms: dict[int, Average] = {}
        self._step_ms = Average()
        self._depth_ms = Average()
        self._link_ms = Average()
        self._rate = Average()
        self._ar_ms = Average()
        self._hits = Average()
        self._turnaround_ms = Average()
        self.drafted = Acceptance()
        self.ngram = Acceptance()

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

    def saw_draft(self, tokens: int, milliseconds: float) -> None:
        """A chain of `tokens` drafted in one go."""
        self._step_ms.add(milliseconds / max(tokens, 1))

    def saw_depth(self, milliseconds: float) -> None:
        """All branches one token deeper."""
        self._depth_ms.add(milliseconds)

    def saw_chain(self, source: str, length: int, accepted: int) -> None:
        """A verified chain, by where it came from (`ngram`, or anything a drafter made)."""
        (self.ngram if source == "ngram" else self.drafted).add(length, accepted)

    def saw_link(self, milliseconds: float) -> None:
        """What asking the drafter cost beyond its own work."""
        self._link_ms.add(milliseconds)

    def saw_round(self, tokens: int, milliseconds: float) -> None:
        if milliseconds > 0:
            self._rate.add(tokens / milliseconds)

    def saw_ar(self, milliseconds: float) -> None:
        """From one run-ahead token to the next."""
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
        return self._rate.value if self._rate.value is not None else 1.0 / self.verify_ms(1)
