"""Which kind a text is of, judged by how its drafts hold: its prompt says what it looks like, its rounds what it is.

A drafter that does badly in a text of one kind and well in those of another soon says that it is one of these; then all
that is known of these is believed of it, of who has not drafted for it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.learning.kinds import CODE, FREE, REPEATING
from outrider.orchestrator.core.learning.text_odds import TextOdds
from outrider.protocol.heads import NGRAM

# A prompt's looks deceive; a grammar does not.
LOOKS = (FREE, CODE, REPEATING)
# By so much, in logarithms, another kind must explain the rounds better.
DOUBT = 2.0
# A kind that fewer rounds were made in explains nothing.
KNOWN = 24


@dataclass(slots=True)
class Text:
    """`kind`: what it is taken for, at first what it looks like. `greedy`: its temperature is 0. `scores`: of the kinds
    that it may be of, how well each explains its rounds."""

    kind: str
    greedy: bool
    scores: dict[str, float]
    odds: TextOdds

    def explained(self, chances: Mapping[str, float]) -> None:
        """By kind: the logarithm of the chance that what was seen would be seen there; it becomes of the likeliest."""
        for kind, chance in chances.items():
            self.scores[kind] += chance
        best = max(self.scores, key=self.scores.__getitem__)
        if self.scores[best] > self.scores[self.kind]:
            self.kind = best


class Texts:
    """What is known of each kind."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._odds: dict[tuple[str, bool], TextOdds] = {}

    def odds(self, kind: str, greedy: bool) -> TextOdds:
        if (kind, greedy) not in self._odds:
            self._odds[kind, greedy] = TextOdds(self._estimates)
        return self._odds[kind, greedy]

    def begun(self, looks: str, greedy: bool) -> Text:
        """A text that looks like one of this kind."""
        others = [kind for kind in LOOKS if looks in LOOKS and self.odds(kind, greedy).rounds >= KNOWN]
        scores = dict.fromkeys(others, -DOUBT) | {looks: 0.0}
        return Text(looks, greedy, scores, TextOdds(self.odds(looks, greedy)))

    def saw_chain(self, text: Text, drafter: str, drafted: int, accepted: int) -> None:
        """A chain by this drafter, verified in this text."""
        self._judge(text, drafter, drafted, accepted)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.saw_chain(drafter, drafted, accepted)

    def saw_copy(self, text: Text, copied: int, held: int) -> None:
        """What the text said would come, verified or not."""
        self._judge(text, NGRAM, copied, held)
        for odds in (text.odds, self.odds(text.kind, text.greedy)):
            odds.saw_copy(copied, held)

    def _judge(self, text: Text, drafter: str, drafted: int, accepted: int) -> None:
        if drafted:
            kinds = {kind: self.odds(kind, text.greedy) for kind in text.scores}
            text.explained({kind: odds.likelihood(drafter, drafted, accepted) for kind, odds in kinds.items()})
            text.odds.moves_under(self.odds(text.kind, text.greedy))
