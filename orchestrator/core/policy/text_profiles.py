"""How well drafts hold in one text: its kind, its odds, and whether its drafter is still of use.

`TextProfiles`: which kind a text is of: its prompt says what it looks like, its rounds show what it is. A drafter that
does badly in texts of one kind and well in those of another soon shows which this is; then what is known of that kind
is expected here, also of drafters that have not drafted for it yet.

`TextAcceptance`: how well drafts hold in one text, or in texts of one kind: the expectation one level above, moved by
its own rounds. A text begins as its kind is, a kind as all others are, and a drafter that never drafted there is
expected to do as well as elsewhere. Counts only.

`kind_of`: the kind of a text before its first round. A prompt that repeats itself goes on so, and is copied from; a
grammar leaves little to guess; code and prose, which the front tells apart, are each drafted best by another drafter.

`Drift`: whether a drafter in the target's process is still of use to a request: one that proposes nothing, or nothing
that is accepted, is left out. `auto` has left it long before, since it measures what rounds bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.orchestrator.core.policy.estimates import Acceptance, Average, Estimates, Shifted
from outrider.protocol.heads import NGRAM

# Of copies: a text is some forty rounds long.
SMOOTHING = 0.08


class TextAcceptance:
    """`rounds`: so many drafts it has seen."""

    def __init__(self, above: Estimates | TextAcceptance) -> None:
        """`above`: of the kind, or of everything."""
        self._above = above
        self.rounds = 0
        self._drafted: dict[str, Acceptance] = {}
        self._copied = Acceptance(prior=0.3, positions=2)
        self._tokens, self._rows = Average(SMOOTHING), Average(SMOOTHING)

    def moves_under(self, above: TextAcceptance) -> None:
        """It is a text of another kind than was thought: what it has not seen itself it believes of that one."""
        self._above = above

    def holding(self, drafter: str = "") -> Acceptance:
        """How well its tokens hold."""
        own = self._drafted.setdefault(drafter, Shifted() if isinstance(self._above, TextAcceptance) else Acceptance())
        own.prior = self._above.holding(drafter)
        return own

    def copied_a_round(self) -> tuple[float, float]:
        """Of what the text says comes next: how many tokens held in a round, and how many there were."""
        tokens, rows = self._above.copied_a_round()
        return (
            tokens if self._tokens.value is None else self._tokens.value,
            rows if self._rows.value is None else self._rows.value,
        )

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
        """The logarithm of the chance that so many of a chain hold."""
        holding = self._copied if drafter == NGRAM else self.holding(drafter)
        return holding.likelihood(drafted, accepted)


FREE, REPEATING, HELD, CODE = "", "repeating", "held", "code"

# Of the newest tokens, so many at most and at least, this share of the pairs must have been there before.
MOST, LEAST = 512, 24
REPEATED = 0.3


def kind_of(tokens: Sequence[int], held: bool, code: bool = False) -> str:
    """`held`: by a grammar. `code`: it looks like a program."""
    if held:
        return HELD
    other = CODE if code else FREE
    pairs = list(pairwise(tokens[-MOST:]))
    if len(pairs) < LEAST:
        return other
    return REPEATING if len(pairs) - len(set(pairs)) >= REPEATED * len(pairs) else other


# A prompt's looks deceive; a grammar does not.
LOOKS = (FREE, CODE, REPEATING)
# By so much, in logarithms, another kind must explain the rounds better.
DOUBT = 2.0
# A kind that fewer rounds were made in explains nothing.
KNOWN = 24


@dataclass(slots=True)
class TextProfile:
    """`kind`: what it is taken for, at first what it looks like. `greedy`: its temperature is 0. `scores`: of the kinds
    that it may be of, how well each explains its rounds."""

    kind: str
    greedy: bool
    scores: dict[str, float]
    odds: TextAcceptance

    def explained(self, chances: Mapping[str, float]) -> None:
        """By kind: the logarithm of the chance that what was seen would be seen there; it becomes of the likeliest."""
        for kind, chance in chances.items():
            self.scores[kind] += chance
        best = max(self.scores, key=self.scores.__getitem__)
        if self.scores[best] > self.scores[self.kind]:
            self.kind = best


class TextProfiles:
    """What is known of each kind."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._odds: dict[tuple[str, bool], TextAcceptance] = {}

    def odds(self, kind: str, greedy: bool) -> TextAcceptance:
        if (kind, greedy) not in self._odds:
            self._odds[kind, greedy] = TextAcceptance(self._estimates)
        return self._odds[kind, greedy]

    def open(self, looks: str, greedy: bool) -> TextProfile:
        """A text that looks like one of this kind."""
        others = [kind for kind in LOOKS if looks in LOOKS and self.odds(kind, greedy).rounds >= KNOWN]
        scores = dict.fromkeys(others, -DOUBT) | {looks: 0.0}
        return TextProfile(looks, greedy, scores, TextAcceptance(self.odds(looks, greedy)))

    def observe_chain(self, text: TextProfile, drafter: str, drafted: int, accepted: int) -> None:
        """A chain by this drafter, verified in this text."""
        self._judge(text, drafter, drafted, accepted)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe_chain(drafter, drafted, accepted)

    def observe_copy(self, text: TextProfile, copied: int, held: int) -> None:
        """What the text said would come, verified or not."""
        self._judge(text, NGRAM, copied, held)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.observe_copy(copied, held)

    def _judge(self, text: TextProfile, drafter: str, drafted: int, accepted: int) -> None:
        if drafted:
            kinds = {kind: self.odds(kind, text.greedy) for kind in text.scores}
            text.explained({kind: odds.likelihood(drafter, drafted, accepted) for kind, odds in kinds.items()})
            text.odds.moves_under(self.odds(text.kind, text.greedy))


# So many rounds in a row without a token where some were asked for.
SILENT_ROUNDS = 4
# Of so many tokens less than this share held.
TOKENS, LEAST_USE = 128, 0.02


@dataclass(slots=True)
class Drift:
    """Of one drafter in one request."""

    silent: int = 0
    drafted: int = 0
    held: int = 0

    def observe(self, drafted: int, held: int) -> str:
        """A chain of so many tokens that was asked for; why the drafter is of no use any more, if it is not."""
        self.silent = 0 if drafted else self.silent + 1
        self.drafted, self.held = self.drafted + drafted, self.held + held
        if self.silent >= SILENT_ROUNDS:
            return f"it proposed nothing in {self.silent} rounds"
        if self.drafted >= TOKENS:
            if self.held < LEAST_USE * self.drafted:
                return f"{self.held} of its last {self.drafted} tokens were accepted"
            self.drafted, self.held = self.drafted // 2, self.held // 2
        return ""
