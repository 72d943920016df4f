"""A head in the target's process: it reads the hidden rows of what the target verifies, and drafts in turn with it.

Stands where `colocated.Colocated` stands for a drafter that is a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.exit_drafter import ExitDrafter
from outrider.drafting.heads.line import Followed, Line
from outrider.engine.loading import LoadedModel
from outrider.engine.slots import Slot
from outrider.engine.taps import Taps
from outrider.engine.texts import FlatTexts, Texts
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelError
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
        follower = self.drafter.follow(sampling, constraint)
        slot.listener, part = follower.hear, HeadPart(self.drafter, follower)
        return lambda: part


class ColocatedExit:
    """The target's early exit, which drafts in the target's texts."""

    def __init__(self, drafter: ExitDrafter) -> None:
        self.drafter = drafter

    def read(self, model: LoadedModel, texts: Texts) -> None:
        """From now on it drafts in these. Raises ModelError: they share no forwards."""
        if not isinstance(texts, FlatTexts):
            raise ModelError("the target's texts share no forwards, so none can leave it early")
        self.drafter.beside(texts)

    def part_of(
        self, slot: Slot, sampling: SamplingParams, progress: Progress, constraint: Constraint | None
    ) -> Callable[[], HeadPart]:
        """What opens its part of a request, for which nothing has to be heard before."""
        return lambda: HeadPart(self.drafter, self.drafter.follow_text(slot.text, sampling, constraint))


def beside_target(drafter: HeadDrafter) -> ColocatedHead | ColocatedExit:
    return ColocatedExit(drafter) if isinstance(drafter, ExitDrafter) else ColocatedHead(drafter)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What the head knows of one request."""

    drafter: HeadDrafter
    follower: Followed

    def turn(self, tokens: Sequence[int], depth: int) -> Turn:
        """Its turn to draft `depth` tokens after the committed `tokens`."""
        return Turn(self.drafter, Line(self.follower, tokens), depth)

    def close(self, spoilt: bool) -> None:
        """It drafts no more."""
        self.follower.close()
