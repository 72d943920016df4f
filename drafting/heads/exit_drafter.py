"""Drafts with a target's early exit, in its texts."""

from __future__ import annotations

from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.early_exit import EarlyExit
from outrider.drafting.heads.exits import ExitFollower, Exits
from outrider.engine.first_layers import FirstLayers
from outrider.engine.flat_rows import FlatText
from outrider.engine.loading import LoadedModel
from outrider.engine.texts import FlatTexts
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams


class ExitDrafter(HeadDrafter):
    """A drafter of heads that needs the target's texts, `beside` which it stands from then on."""

    def __init__(self, exit: EarlyExit, target: LoadedModel, note: str, agreement: float) -> None:
        self._exits = Exits(exit, FirstLayers(target.model, exit.layers))
        super().__init__(exit, target.vocab_size, note, self._exits, agreement)

    def beside(self, texts: FlatTexts) -> None:
        self._exits.beside(texts)

    def follow_text(
        self, text: FlatText, sampling: SamplingParams, constraint: Constraint | None = None
    ) -> ExitFollower:
        """What drafts are wanted for."""
        return ExitFollower(text, self.sampler(sampling, constraint))
