"""A head in the target's process: it reads the hidden rows of what the target verifies, and drafts in turn with it.

Stands where `colocated.Colocated` stands for a drafter that is a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.follower import Follower
from outrider.drafting.heads.line import Line
from outrider.engine.loading import LoadedModel
from outrider.engine.slots import Slot
from outrider.engine.taps import Taps
from outrider.engine.texts import Texts
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.colocated import Progress, Turn


class ColocatedHead:
    """The head beside the target."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self.drafter = drafter

    def read(self, model: LoadedModel, texts: Texts) -> None:
        """From now on it can read what these texts of the target think."""
        texts.tap(Taps(model.model, self.drafter.head.points, self.drafter.head.fuse))

    def part_of(
        self, slot: Slot, sampling: SamplingParams, progress: Progress, constraint: Constraint | None
    ) -> Callable[[], HeadPart]:
        """What opens its part of a request, which hears from the first token on, opened or not."""
        part = HeadPart(self.drafter, self.drafter.follow(sampling, constraint))
        slot.listener = part.follower.hear
        return lambda: part


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What the head knows of one request."""

    drafter: HeadDrafter
    follower: Follower

    def turn(self, tokens: Sequence[int], depth: int) -> Turn:
        """Its turn to draft `depth` tokens after the committed `tokens`."""
        return Turn(self.drafter, Line(self.follower, tokens), depth)

    def close(self, spoilt: bool) -> None:
        """It drafts no more."""
        self.follower.close()
