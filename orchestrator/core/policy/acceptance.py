"""How often drafts are accepted: in all texts, in a kind of text, and in one text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING

from outrider.orchestrator.core.policy.constants import POLICY
from outrider.protocol.messages import InProcessDrafter

if TYPE_CHECKING:
    from outrider.orchestrator.core.policy.estimates import Estimates

MAX_POSITIONS = 64
GENERAL_TEXT, REPEATING_TEXT, CONSTRAINED_TEXT, CODE_TEXT = "", "repeating", "constrained", "code"


class Average:
    """The mean of the first samples, then an exponential moving average: the first, often slow, does not dominate.

    Calling it returns its `value`, which is `prior` before the first sample.
    """

    def __init__(self, prior: float = 0.0, smoothing: float | None = None) -> None:
        self.is_known = False
        self.value, self._smoothing, self._count = prior, smoothing or POLICY.smoothing, 0

    def __call__(self) -> float:
        return self.value

    def add(self, value: float) -> None:
        self._count += 1
        self.value = self.value_or(value)
        self.value += max(1.0 / self._count, self._smoothing) * (value - self.value)
        self.is_known = True

    def add_time(self, milliseconds: float, usual: float = 0.0) -> None:
        """Adds a time; one longer than `max_stall_factor` average ones, and than `usual`, was delayed by a stall."""
        most = max(POLICY.max_stall_factor * self.value, usual) if self.is_known else 0.0
        self.add(min(milliseconds, most or math.inf))

    def start_from(self, value: float, weight: float = math.inf) -> None:
        """Begins from an earlier average, which weighs as much as `weight` samples, but fades as they do."""
        self.value, self._count = value, round(min(weight, 1.0 / self._smoothing))
        self.is_known = True

    def value_or(self, prior: float) -> float:
        """Returns its value, or another prior."""
        return self.value if self.is_known else prior


class CopyStats:
    """Rounds that n-grams alone would make: the `share` with a copy to verify, and that copy's `rows` and `right`
    tokens on average."""

    def __init__(self) -> None:
        self.share, self.rows, self.right = Average(), Average(), Average()

    def add(self, rows: int, right: int) -> None:
        """Records a round that would verify `rows` tokens of a copy (0: there is none), `right` of them right."""
        self.share.add(rows > 0)
        if rows:
            self.rows.add(rows)
            self.right.add(right)


class Acceptance:
    """The probability that chain token i is accepted, given that those before it are.

    The first `positions` have counts of their own; the last of them is used for all that follow.
    """

    def __init__(self, prior: float | Acceptance | None = None, positions: int = MAX_POSITIONS) -> None:
        self.prior = POLICY.prior_rate if prior is None else prior
        self._tried = [0.0] * positions
        self._accepted = [0.0] * positions

    def add(self, chain_length: int, accepted: int) -> None:
        for index in range(min(accepted + 1, chain_length)):
            position = min(index, len(self._tried) - 1)
            self._tried[position] = POLICY.fade * self._tried[position] + 1.0
            self._accepted[position] = POLICY.fade * self._accepted[position] + float(index < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Begins from `rates` by position, weighed as `prior_chains` rounds."""
        for position, rate in enumerate(rates[: len(self._tried)]):
            self._tried[position], self._accepted[position] = POLICY.prior_chains, POLICY.prior_chains * min(rate, 1.0)

    def known(self) -> tuple[float, ...]:
        """Returns the rates of the positions that have samples."""
        count = next((i for i, tried in enumerate(self._tried) if not tried), len(self._tried))
        return tuple(self.rate(position) for position in range(count))

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        """Returns the probability at a position, without the chains that `without` (a part of this) has counted."""
        index = min(position, len(self._tried) - 1)
        tried, accepted = self._tried[index], self._accepted[index]
        if without is not None:
            tried = max(tried - without._tried[index], 0.0)
            accepted = min(max(accepted - without._accepted[index], 0.0), tried)
        return (accepted + POLICY.prior_chains * self._prior_rate(position)) / (tried + POLICY.prior_chains)

    def _prior_rate(self, position: int) -> float:
        """Returns the prior at a position, without this object's own chains: they must not count at two levels."""
        return self.prior.rate(position, without=self) if isinstance(self.prior, Acceptance) else self.prior

    def reach(self, position: int) -> float:
        """Returns the probability that chain token `position` and all before it are accepted."""
        return math.prod(self.rate(i) for i in range(position + 1))

    def expected_tokens(self, chain_length: int) -> float:
        """Returns E[tokens] of a round with a chain of this length, the bonus token included."""
        reach = total = 1.0
        for position in range(chain_length):
            reach *= self.rate(position)
            total += reach
        return total


class ScaledAcceptance(Acceptance):
    """The acceptance in one text: that of `prior`, with the failure rate of all positions scaled by one factor.

    A text is hard or easy as a whole, so a few chains show it; older ones fade, since a long text may change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rejected = self._expected = 0.0

    def add(self, chain_length: int, accepted: int) -> None:
        super().add(chain_length, accepted)
        expected = sum(1.0 - self._prior_rate(i) for i in range(min(accepted + 1, chain_length)))
        self._expected = POLICY.fade * self._expected + expected
        self._rejected = POLICY.fade * self._rejected + float(accepted < chain_length)

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        weight = POLICY.prior_rejections
        factor = (POLICY.optimism * weight + self._rejected) / (weight + self._expected)
        return max(1.0 - (1.0 - self._prior_rate(position)) * factor, 0.0)


class InProcessStats:
    """The acceptance (`drafted`) and cost of one in-process drafter, from its trial at load until it has drafted.
    `is_head`: whether it reads the target's hidden states."""

    def __init__(self, drafter: InProcessDrafter) -> None:
        self.name, self.is_head = drafter.name, drafter.is_head
        self.drafted = Acceptance(drafter.agreement if drafter.agreement >= 0 else POLICY.prior_rate)
        self._weight = drafter.weight
        self._step_ms = Average()

    def observe(self, tokens: int, accepted: int, milliseconds: float) -> None:
        """Records a chain of `tokens`, drafted in one batch with those of other requests."""
        self.drafted.add(tokens, accepted)
        self._step_ms.add_time(milliseconds / max(tokens, 1))

    def start_from(self, step_ms: float, acceptance: tuple[float, ...]) -> None:
        """Begins from earlier measurements."""
        self._step_ms.start_from(step_ms)
        self.drafted.start_from(acceptance)

    @property
    def is_known(self) -> bool:
        """Whether the drafter has drafted."""
        return self._step_ms.is_known

    def step_ms(self, forward_ms: float) -> float:
        """Returns the time for a token; before the first chain, its trial's share of the target's `forward_ms`."""
        return self._step_ms.value_or(self._weight * forward_ms)


class TextAcceptance:
    """The acceptance in one text or in a `kind` of text: that of the level `above`, moved by its own rounds.

    A text begins with the acceptance of its kind, and a kind with that of all texts, drafter by drafter. The rounds of
    a text also count for its kind.
    """

    def __init__(self, above: Estimates | TextAcceptance, kind: str = GENERAL_TEXT) -> None:
        self.kind = kind
        self._above = above
        self._drafted: dict[str, Acceptance] = {}
        self._copies = CopyStats()

    def acceptance_of(self, drafter: str = "") -> Acceptance:
        """Returns the drafter's acceptance."""
        acceptance = self._drafted.get(drafter)
        if acceptance is None:
            is_text = isinstance(self._above, TextAcceptance)
            acceptance = self._drafted[drafter] = ScaledAcceptance() if is_text else Acceptance()
            acceptance.prior = self._above.acceptance_of(drafter)
        return acceptance

    @property
    def copies(self) -> CopyStats:
        """The rounds that n-grams alone would make."""
        return self._copies if self._copies.share.is_known else self._above.copies

    def observe(self, drafter: str, drafted: int, accepted: int) -> None:
        """Records a verified chain of a drafter."""
        self.acceptance_of(drafter).add(drafted, min(accepted, drafted))
        if isinstance(self._above, TextAcceptance):
            self._above.observe(drafter, drafted, accepted)

    def observe_copies(self, rows: int, right: int) -> None:
        """Records a round that n-grams alone would have made (`CopyStats`)."""
        if not self._copies.share.is_known:
            self._copies = deepcopy(self._above.copies)
        self._copies.add(rows, right)
        if isinstance(self._above, TextAcceptance):
            self._above.observe_copies(rows, right)


def classify_text(tokens: Sequence[int], constrained: bool, code: bool = False) -> str:
    """Guesses the kind of a text before its first round; `constrained`: by a grammar; `code`: it seems to be a program.

    A prompt that repeats itself usually continues to, and n-grams copy from it; grammars leave few choices; code and
    prose, told apart by the front, suit different drafters.
    """
    if constrained:
        return CONSTRAINED_TEXT
    other = CODE_TEXT if code else GENERAL_TEXT
    pairs = list(pairwise(tokens[-POLICY.max_repeat_tokens :]))
    if len(pairs) < POLICY.min_repeat_pairs:
        return other
    return REPEATING_TEXT if len(pairs) - len(set(pairs)) >= POLICY.repeated_share * len(pairs) else other
