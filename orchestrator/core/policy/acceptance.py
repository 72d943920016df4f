"""How often drafts are accepted: in all texts, in a kind of text, and in one text.

`Average` follows its samples and forgets slowly. `Acceptance` estimates how often the tokens of a chain are accepted,
`InProcessDrafts` acceptance and cost of one in-process drafter (by its trial at load until it has drafted).

`TextProfiles` decides which kind a text is: its prompt gives a first guess, its rounds decide. A drafter that does
badly in texts of one kind and well in those of another soon shows the kind; then the acceptance of that kind is
expected here, also for drafters that have not drafted for the text yet.

`TextAcceptance` is the acceptance in one text, or in texts of one kind: that of the level above, moved by its own
rounds. A text begins as its kind, a kind as all texts, and a drafter that never drafted there as elsewhere.

`kind_of` gives the kind of a text before its first round. A prompt that repeats itself will continue so, and n-grams
copy from it; a grammar leaves little to guess; code and prose, which the front distinguishes, suit different drafters.

`Drift` decides whether an in-process drafter is still of use to a request: it is left out if it proposes nothing, or
nothing that is accepted. `auto` leaves it long before that, since it measures rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import InProcessDrafter

if TYPE_CHECKING:
    from outrider.orchestrator.core.policy.estimates import Estimates

SMOOTHING = 0.1
FADE = 0.99


class Average:
    """The mean of the first samples, then an exponential moving average: no first sample, often slow, weighs most.

    Its `value`, for which it may also be called, is `prior` before the first sample.
    """

    def __init__(self, prior: float = 0.0, smoothing: float = SMOOTHING) -> None:
        self.is_known = False
        self.value, self._smoothing, self._count = prior, smoothing, 0

    def __call__(self) -> float:
        return self.value

    def add(self, value: float) -> None:
        self._count += 1
        self.value = self.value_or(value)
        self.value += max(1.0 / self._count, self._smoothing) * (value - self.value)
        self.is_known = True

    def start_from(self, value: float, weight: float = math.inf) -> None:
        """Begins from an earlier average, which weighs as much as `weight` samples, but fades as they do."""
        self.value, self._count = value, round(min(weight, 1.0 / self._smoothing))
        self.is_known = True

    def value_or(self, prior: float) -> float:
        """Returns its value, or another prior."""
        return self.value if self.is_known else prior


PRIOR_WEIGHT = 8.0
PRIOR_ACCEPTANCE = 0.7
# In one text the acceptance of its kind weighs as much as this many rejected chains.
PRIOR_BREAKS = 3.0
# A text begins with this share of its kind's rejections: only drafting shows how it differs, and texts differ more than
# the cost of a few rounds.
OPTIMISM = 0.75
MAX_POSITIONS = 64
# The least probability of acceptance, and of rejection, in a likelihood.
SELDOM = 0.02


class Acceptance:
    """The probability that chain token i is accepted, given that those before it are.

    The first `positions` have counts of their own; the last of them is used for all that follow.
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
        """Begins from `rates` by position, weighed as `PRIOR_WEIGHT` rounds."""
        for position, rate in enumerate(rates[: len(self._tried)]):
            self._tried[position], self._held[position] = PRIOR_WEIGHT, PRIOR_WEIGHT * min(rate, 1.0)

    def known(self) -> tuple[float, ...]:
        """Returns the rates of the positions that have samples."""
        count = next((i for i, tried in enumerate(self._tried) if not tried), len(self._tried))
        return tuple(self.rate(position) for position in range(count))

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        """Returns the probability at a position; the chains counted in `without`, a part of these, are left out."""
        index = min(position, len(self._tried) - 1)
        tried, held = self._tried[index], self._held[index]
        if without is not None:
            tried = max(tried - without._tried[index], 0.0)
            held = min(max(held - without._held[index], 0.0), tried)
        return (held + self._weight * self._prior_rate(position)) / (tried + self._weight)

    def _prior_rate(self, position: int) -> float:
        """Returns the prior at a position, without this object's own chains: they must not count at two levels."""
        return self.prior.rate(position, without=self) if isinstance(self.prior, Acceptance) else self.prior

    def likelihood(self, chain_length: int, accepted: int) -> float:
        """Returns the log-probability that exactly `accepted` tokens of a chain are accepted."""
        rates = [min(max(self.rate(i), SELDOM), 1.0 - SELDOM) for i in range(min(accepted + 1, chain_length))]
        rejected = math.log(1.0 - rates[accepted]) if accepted < chain_length else 0.0
        return rejected + sum(map(math.log, rates[:accepted]))

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


class Shifted(Acceptance):
    """The acceptance in one text: that of `prior`, with the failure rate of all positions scaled by one factor.

    A text is hard or easy as a whole, so a few chains show it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rejected, self._expected = OPTIMISM * PRIOR_BREAKS, PRIOR_BREAKS

    def add(self, chain_length: int, accepted: int) -> None:
        super().add(chain_length, accepted)
        self._expected += sum(1.0 - self._prior_rate(i) for i in range(min(accepted + 1, chain_length)))
        self._rejected += float(accepted < chain_length)

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        return max(1.0 - (1.0 - self._prior_rate(position)) * self._rejected / self._expected, 0.0)


# A drafter's token takes at least this share of a target step, however small the drafter is.
LEAST_WEIGHT = 0.05


class InProcessDrafts:
    """One in-process drafter: `drafted` is its acceptance, `is_head` whether it reads the target's hidden states."""

    def __init__(self, drafter: InProcessDrafter) -> None:
        self.name, self.is_head = drafter.name, drafter.is_head
        self.drafted = Acceptance(drafter.agreement if drafter.agreement >= 0 else PRIOR_ACCEPTANCE)
        self._weight = max(drafter.weight, LEAST_WEIGHT)
        self._step_ms = Average()

    def observe(self, tokens: int, accepted: int, milliseconds: float) -> None:
        """Records a chain of `tokens`, drafted in one batch with those of other requests."""
        self.drafted.add(tokens, accepted)
        self._step_ms.add(milliseconds / max(tokens, 1))

    def start_from(self, step_ms: float, acceptance: tuple[float, ...]) -> None:
        """Begins from earlier measurements."""
        self._step_ms.start_from(step_ms)
        self.drafted.start_from(acceptance)

    @property
    def is_known(self) -> bool:
        """Whether the drafter has drafted."""
        return self._step_ms.is_known

    def step_ms(self, forward_ms: float) -> float:
        """Returns the time for a token; before the first chain, by its trial and the target's `forward_ms`."""
        return self._step_ms.value_or(self._weight * forward_ms)


# For copies: a text is some forty rounds long.
COPY_SMOOTHING = 0.08


class TextAcceptance:
    """The acceptance in one text or kind of text, after `rounds` chains; `above` is that of its kind, or of all. A
    text may move to another kind; its own rounds still count."""

    def __init__(self, above: Estimates | TextAcceptance) -> None:
        self.above = above
        self.rounds = 0
        self._drafted: dict[str, Acceptance] = {}
        self._copied = Acceptance(prior=0.3, positions=2)
        self._tokens, self._rows = Average(smoothing=COPY_SMOOTHING), Average(smoothing=COPY_SMOOTHING)

    def holding(self, drafter: str = "") -> Acceptance:
        """Returns the drafter's acceptance."""
        acceptance = self._drafted.get(drafter)
        if acceptance is None:
            is_text = isinstance(self.above, TextAcceptance)
            acceptance = self._drafted[drafter] = Shifted() if is_text else Acceptance()
        acceptance.prior = self.above.holding(drafter)
        return acceptance

    def copied_a_round(self) -> tuple[float, float]:
        """Returns the right tokens and all tokens of the copies, per round."""
        tokens, rows = self.above.copied_a_round()
        return self._tokens.value_or(tokens), self._rows.value_or(rows)

    def observe(self, drafter: str, drafted: int, accepted: int) -> None:
        """Records a verified chain of a drafter, or a copy (`NGRAM`), verified or not, with this many right tokens."""
        if drafter != NGRAM:
            self.rounds += 1
            self.holding(drafter).add(drafted, min(accepted, drafted))
            return
        if not self._tokens.is_known:
            tokens, rows = self.above.copied_a_round()
            self._tokens.start_from(tokens)
            self._rows.start_from(rows)
        self._tokens.add(accepted)
        self._rows.add(drafted)
        self._copied.add(drafted, accepted)

    def likelihood(self, drafter: str, drafted: int, accepted: int) -> float:
        """Returns the log-probability that exactly `accepted` tokens of a chain are accepted."""
        acceptance = self._copied if drafter == NGRAM else self.holding(drafter)
        return acceptance.likelihood(drafted, accepted)


FREE, REPEATING, HELD, CODE = "", "repeating", "held", "code"

# A text repeats itself if at least the share REPEATED of the pairs among its newest tokens (at most MOST, at least
# LEAST pairs) repeats earlier ones.
MOST, LEAST = 512, 24
REPEATED = 0.3


def kind_of(tokens: Sequence[int], held: bool, code: bool = False) -> str:
    """Returns the kind of a text; `held`: a grammar constrains it; `code`: it looks like a program."""
    if held:
        return HELD
    other = CODE if code else FREE
    pairs = list(pairwise(tokens[-MOST:]))
    if len(pairs) < LEAST:
        return other
    return REPEATING if len(pairs) - len(set(pairs)) >= REPEATED * len(pairs) else other


# The kinds that a prompt only suggests; a grammar is certain.
LOOKS = (FREE, CODE, REPEATING)
# By how much another kind must explain the rounds better, as a log-probability.
DOUBT = 2.0
# A kind with fewer rounds is not considered.
KNOWN = 24


@dataclass(slots=True)
class TextProfile:
    """The state of one text: its presumed `kind`, whether its temperature is 0 (`greedy`), and for each possible kind
    the log-probability of its rounds (`scores`)."""

    kind: str
    greedy: bool
    scores: dict[str, float]
    odds: TextAcceptance


class TextProfiles:
    """The acceptance in each kind of text, by greedy or not."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._odds: dict[tuple[str, bool], TextAcceptance] = {}

    def odds(self, kind: str, greedy: bool) -> TextAcceptance:
        if (kind, greedy) not in self._odds:
            self._odds[kind, greedy] = TextAcceptance(self._estimates)
        return self._odds[kind, greedy]

    def open(self, looks: str, greedy: bool) -> TextProfile:
        """Returns the profile of a new text that looks like one of this kind."""
        others = [kind for kind in LOOKS if looks in LOOKS and self.odds(kind, greedy).rounds >= KNOWN]
        scores = dict.fromkeys(others, -DOUBT) | {looks: 0.0}
        return TextProfile(looks, greedy, scores, TextAcceptance(self.odds(looks, greedy)))

    def observe(self, text: TextProfile, drafter: str, drafted: int, accepted: int) -> None:
        """Records the same in a text and in its kind, which becomes the one that its rounds are likeliest in."""
        if drafted:
            for kind in text.scores:
                text.scores[kind] += self.odds(kind, text.greedy).likelihood(drafter, drafted, accepted)
            best = max(text.scores, key=text.scores.__getitem__)
            if text.scores[best] > text.scores[text.kind]:
                text.kind = best
            text.odds.above = self.odds(text.kind, text.greedy)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe(drafter, drafted, accepted)


# A drafter is left out after this many rounds in a row without a token,
SILENT_ROUNDS = 4
# or if less than the share LEAST_USE of TOKENS tokens was accepted.
TOKENS, LEAST_USE = 128, 0.02


@dataclass(slots=True)
class Drift:
    """The recent use of one drafter to one request."""

    silent: int = 0
    drafted: int = 0
    held: int = 0

    def observe(self, drafted: int, held: int) -> str:
        """Records a chain; returns why the drafter is of no use any more, empty if it is of use."""
        self.silent = 0 if drafted else self.silent + 1
        self.drafted, self.held = self.drafted + drafted, self.held + held
        if self.silent >= SILENT_ROUNDS:
            return f"it proposed nothing in {self.silent} rounds"
        if self.drafted >= TOKENS:
            if self.held < LEAST_USE * self.drafted:
                return f"{self.held} of its last {self.drafted} tokens were accepted"
            self.drafted, self.held = self.drafted // 2, self.held // 2
        return ""
