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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from outrider.orchestrator.core.policy.constants import POLICY
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import InProcessDrafter

if TYPE_CHECKING:
    from outrider.orchestrator.core.policy.estimates import Estimates


class Average:
    """The mean of the first samples, then an exponential moving average: no first sample, often slow, weighs most.

    Its `value`, for which it may also be called, is `prior` before the first sample.
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

    def start_from(self, other: CopyStats) -> None:
        """Begins from those of other texts."""
        self.share.start_from(other.share())
        self.rows.start_from(other.rows())
        self.right.start_from(other.right())

    def add(self, rows: int, right: int) -> None:
        """Records a round that would verify `rows` tokens of a copy (0: there is none), `right` of them right."""
        self.share.add(rows > 0)
        if rows:
            self.rows.add(rows)
            self.right.add(right)


MAX_POSITIONS = 64
SELDOM = 0.02  # the least probability in a likelihood, so that no chain decides alone


class Acceptance:
    """The probability that chain token i is accepted, given that those before it are.

    The first `positions` have counts of their own; the last of them is used for all that follow.
    """

    def __init__(
        self,
        prior: float | Acceptance | None = None,
        weight: float | None = None,
        positions: int = MAX_POSITIONS,
        fade: float | None = None,
    ) -> None:
        self.prior = POLICY.prior_rate if prior is None else prior
        self._weight, self._fade = weight or POLICY.prior_chains, fade or POLICY.fade
        self._tried = [0.0] * positions
        self._held = [0.0] * positions

    def add(self, chain_length: int, accepted: int) -> None:
        for index in range(min(accepted + 1, chain_length)):
            position = min(index, len(self._tried) - 1)
            self._tried[position] = self._fade * self._tried[position] + 1.0
            self._held[position] = self._fade * self._held[position] + float(index < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Begins from `rates` by position, weighed as `prior_chains` rounds."""
        for position, rate in enumerate(rates[: len(self._tried)]):
            self._tried[position], self._held[position] = POLICY.prior_chains, POLICY.prior_chains * min(rate, 1.0)

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
        self._rejected, self._expected = POLICY.optimism * POLICY.prior_rejections, POLICY.prior_rejections

    def add(self, chain_length: int, accepted: int) -> None:
        super().add(chain_length, accepted)
        self._expected += sum(1.0 - self._prior_rate(i) for i in range(min(accepted + 1, chain_length)))
        self._rejected += float(accepted < chain_length)

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        return max(1.0 - (1.0 - self._prior_rate(position)) * self._rejected / self._expected, 0.0)


class InProcessDrafts:
    """One in-process drafter: `drafted` is its acceptance, `is_head` whether it reads the target's hidden states."""

    def __init__(self, drafter: InProcessDrafter) -> None:
        self.name, self.is_head = drafter.name, drafter.is_head
        self.drafted = Acceptance(drafter.agreement if drafter.agreement >= 0 else POLICY.prior_rate)
        self._weight = drafter.weight
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


class TextAcceptance:
    """The acceptance in one text or kind of text, after `rounds` chains; `above` is that of its kind, or of all. A
    text may move to another kind; its own rounds still count."""

    def __init__(self, above: Estimates | TextAcceptance) -> None:
        self.above = above
        self.rounds = 0
        self._drafted: dict[str, Acceptance] = {}
        self._copied = Acceptance(prior=POLICY.prior_copied, positions=2)
        self._copies = CopyStats()

    def holding(self, drafter: str = "") -> Acceptance:
        """Returns the drafter's acceptance."""
        acceptance = self._drafted.get(drafter)
        if acceptance is None:
            is_text = isinstance(self.above, TextAcceptance)
            acceptance = self._drafted[drafter] = Shifted() if is_text else Acceptance()
        acceptance.prior = self.above.holding(drafter)
        return acceptance

    @property
    def copies(self) -> CopyStats:
        """The rounds that n-grams alone would make."""
        return self._copies if self._copies.share.is_known else self.above.copies

    def observe(self, drafter: str, drafted: int, accepted: int) -> None:
        """Records a verified chain of a drafter, or a copy (`NGRAM`), verified or not, with this many right tokens."""
        if drafter == NGRAM:
            self._copied.add(drafted, accepted)
        else:
            self.rounds += 1
            self.holding(drafter).add(drafted, min(accepted, drafted))

    def observe_copies(self, rows: int, right: int) -> None:
        """Records a round that n-grams alone would have made (`CopyStats`)."""
        if not self._copies.share.is_known:
            self._copies.start_from(self.above.copies)
        self._copies.add(rows, right)

    def likelihood(self, drafter: str, drafted: int, accepted: int) -> float:
        """Returns the log-probability that exactly `accepted` tokens of a chain are accepted."""
        acceptance = self._copied if drafter == NGRAM else self.holding(drafter)
        return acceptance.likelihood(drafted, accepted)


FREE, REPEATING, HELD, CODE = "", "repeating", "held", "code"


def kind_of(tokens: Sequence[int], held: bool, code: bool = False) -> str:
    """Returns the kind of a text; `held`: a grammar constrains it; `code`: it looks like a program."""
    if held:
        return HELD
    other = CODE if code else FREE
    pairs = list(pairwise(tokens[-POLICY.repeat_most :]))
    if len(pairs) < POLICY.repeat_least:
        return other
    return REPEATING if len(pairs) - len(set(pairs)) >= POLICY.repeated_share * len(pairs) else other


# The kinds that a prompt only suggests; a grammar is certain.
LOOKS = (FREE, CODE, REPEATING)


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
        self._odds = defaultdict[tuple[str, bool], TextAcceptance](lambda: TextAcceptance(estimates))

    def odds(self, kind: str, greedy: bool) -> TextAcceptance:
        return self._odds[kind, greedy]

    def open(self, looks: str, greedy: bool) -> TextProfile:
        """Returns the profile of a new text that looks like one of this kind."""
        others = [kind for kind in LOOKS if looks in LOOKS and self.odds(kind, greedy).rounds >= POLICY.known_rounds]
        scores = dict.fromkeys(others, -POLICY.kind_doubt) | {looks: 0.0}
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

    def observe_copies(self, text: TextProfile, rows: int, right: int) -> None:
        """Records the same in a text and in its kind."""
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe_copies(rows, right)


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
        if self.silent >= POLICY.silent_rounds:
            return f"it proposed nothing in {self.silent} rounds"
        if self.drafted >= POLICY.judged_tokens:
            if self.held < POLICY.least_use * self.drafted:
                return f"{self.held} of its last {self.drafted} tokens were accepted"
            self.drafted, self.held = self.drafted // 2, self.held // 2
        return ""
