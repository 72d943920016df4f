"""How well drafts hold in one text, or in texts of one kind: what is believed above it, moved by its own rounds.

So a text begins as its kind is and a kind as all others are, and where a drafter never drafted, it is believed to do as
well as elsewhere. Knows counts only.
"""

from __future__ import annotations

from outrider.orchestrator.core.learning.acceptance import Acceptance, Shifted
from outrider.orchestrator.core.learning.averages import Average
from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.protocol.heads import NGRAM

# Of copies: a text is some forty rounds long.
SMOOTHING = 0.08


class TextOdds:
    """`rounds`: so many drafts it has seen."""

    def __init__(self, above: Estimates | TextOdds) -> None:
        """`above`: of the kind, or of everything."""
        self._above = above
        self.rounds = 0
        self._drafted: dict[str, Acceptance] = {}
        self._copied = Acceptance(prior=0.3, positions=2)
        self._tokens, self._rows = Average(SMOOTHING), Average(SMOOTHING)

    def moves_under(self, above: TextOdds) -> None:
        """It is a text of another kind than was thought: what it has not seen itself it believes of that one."""
        self._above = above

    def holding(self, drafter: str = "") -> Acceptance:
        """How well its tokens hold."""
        own = self._drafted.setdefault(drafter, Shifted() if isinstance(self._above, TextOdds) else Acceptance())
        own.prior = self._above.holding(drafter)
        return own

    def copied_a_round(self) -> tuple[float, float]:
        """Of what the text says comes next: how many tokens held in a round, and how many there were."""
        tokens, rows = self._above.copied_a_round()
        return (
            tokens if self._tokens.value is None else self._tokens.value,
            rows if self._rows.value is None else self._rows.value,
        )

    def saw_chain(self, drafter: str, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.holding(drafter).add(drafted, min(accepted, drafted))

    def saw_copy(self, copied: int, held: int) -> None:
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
