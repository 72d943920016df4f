"""The kind of a text, the acceptance of drafts in it, and whether its in-process drafter is still of use.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.orchestrator.core.policy.estimates import Acceptance, Average, Estimates, Shifted
from outrider.protocol.heads import NGRAM

# For copies: a text is some forty rounds long.
SMOOTHING = 0.08


class TextAcceptance:
    """The acceptance in one text or kind of text, after `rounds` chains; `above` is that of its kind, or of all."""

    def __init__(self, above: Estimates | TextAcceptance) -> None:
        self._above = above
        self.rounds = 0
        self._drafted: dict[str, Acceptance] = {}
        self._copied = Acceptance(prior=0.3, positions=2)
        self._tokens, self._rows = Average(SMOOTHING), Average(SMOOTHING)

    def set_above(self, above: TextAcceptance) -> None:
        """Moves the text to another kind; its own rounds still count."""
        self._above = above

    def holding(self, drafter: str = "") -> Acceptance:
        """Returns the drafter's acceptance."""
        acceptance = self._drafted.get(drafter)
        if acceptance is None:
            is_text = isinstance(self._above, TextAcceptance)
            acceptance = self._drafted[drafter] = Shifted() if is_text else Acceptance()
        acceptance.prior = self._above.holding(drafter)
        return acceptance

    def copied_a_round(self) -> tuple[float, float]:
        """Returns the right tokens and all tokens of the copies, per round."""
        tokens, rows = self._above.copied_a_round()
        return self._tokens.value_or(tokens), self._rows.value_or(rows)

    def observe_chain(self, drafter: str, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.holding(drafter).add(drafted, min(accepted, drafted))

    def observe_copy(self, copied: int, held: int) -> None:
        if self._tokens.value is None:
            tokens, rows = self._above.copied_a_round()
            self._tokens.add(tokens)
            self._rows.add(rows)
        self._tokens.add(held)
        self._rows.add(copied)
        self._copied.add(copied, held)

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

    def add_scores(self, likelihoods: Mapping[str, float]) -> None:
        """Adds the log-probability of an observation in each kind; the text becomes of the likeliest kind."""
        for kind, likelihood in likelihoods.items():
            self.scores[kind] += likelihood
        best = max(self.scores, key=self.scores.__getitem__)
        if self.scores[best] > self.scores[self.kind]:
            self.kind = best


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

    def observe_chain(self, text: TextProfile, drafter: str, drafted: int, accepted: int) -> None:
        """Records a chain by this drafter that was verified in this text."""
        self._judge(text, drafter, drafted, accepted)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe_chain(drafter, drafted, accepted)

    def observe_copy(self, text: TextProfile, copied: int, held: int) -> None:
        """Records a copy, verified or not, with `held` right tokens."""
        self._judge(text, NGRAM, copied, held)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe_copy(copied, held)

    def _judge(self, text: TextProfile, drafter: str, drafted: int, accepted: int) -> None:
        if drafted:
            kinds = {kind: self.odds(kind, text.greedy) for kind in text.scores}
            text.add_scores({kind: odds.likelihood(drafter, drafted, accepted) for kind, odds in kinds.items()})
            text.odds.set_above(self.odds(text.kind, text.greedy))


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
