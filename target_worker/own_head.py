"""A head in the target's process: it reads the hidden rows of what the target verifies, and drafts in turn with it.

Stands where `colocated.Colocated` stands for a drafter that is a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafting.heads.beside import Turns
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.exit_drafter import ExitDrafter
from outrider.drafting.heads.exits import ExitFollower
from outrider.drafting.heads.follower import Follower
from outrider.drafting.heads.head import Head
from outrider.drafting.heads.remembered import SavedPairs
from outrider.engine.slots import Slot
from outrider.engine.texts import FlatTexts, Texts
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.colocated import Progress, Turn


class ColocatedHead:
    """The head beside the target."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self.drafter = drafter

    @property
    def head(self) -> Head:
        return self.drafter.head

    def follow(self, sampling: SamplingParams, constraint: Constraint | None) -> Follower:
        """What is to hear a request's text from the first token on."""
        return self.drafter.follow(sampling, constraint)

    def part_of(self, follower: Follower, slot: Slot, sampling: SamplingParams) -> HeadPart:
        """Its part of the request that this follows."""
        part = HeadPart(self.drafter, follower, slot)
        most = min(len(slot.tokens) + sampling.max_tokens, self.head.context_length)
        self.drafter.prompt_cache.enter(part, most)
        return part


class ColocatedExit:
    """The target's early exit, which drafts in the target's texts."""

    def __init__(self, drafter: ExitDrafter) -> None:
        self.drafter = drafter

    def read(self, texts: Texts) -> None:
        """From now on it drafts in these. Raises ModelError: they share no forwards."""
        if not isinstance(texts, FlatTexts):
            raise ModelError("the target can't batch requests, which early exit needs")
        self.drafter.beside(texts)

    def part_of(
        self, slot: Slot, sampling: SamplingParams, progress: Progress, constraint: Constraint | None
    ) -> Callable[[], ExitPart]:
        """What opens its part of a request, for which nothing has to be heard before."""
        return lambda: ExitPart(self.drafter, self.drafter.follow_text(slot.text, sampling, constraint))


def beside_target(drafter: HeadDrafter) -> ColocatedHead | ColocatedExit:
    return ColocatedExit(drafter) if isinstance(drafter, ExitDrafter) else ColocatedHead(drafter)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeadPart:
    """What the head knows of one request. A `prompt_cache.Source` for others that begin alike."""

    drafter: HeadDrafter
    follower: Follower
    slot: Slot
    turns: Turns = field(default_factory=Turns)

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> Turn:
        """Its turn to draft `depth` tokens after the committed `tokens`, and others beside them."""
        line = self.turns.line(self.follower, tokens, self.drafter.calibration, least)
        return Turn(self.drafter, line, depth)

    def lendable(self) -> Sequence[int]:
        return self.follower.lendable(self.slot.tokens)

    def save(self, length: int) -> SavedPairs:
        return self.follower.save(length)

    def close(self, spoilt: bool) -> None:
        """It drafts no more; what the head has read stays for later texts, unless it may be spoilt."""
        self.drafter.prompt_cache.leave(self)
        if not spoilt:
            self.drafter.keep(self.follower, self.slot.tokens)
        self.follower.close()


@dataclass(frozen=True, slots=True)
class ExitPart:
    """What an early exit knows of one request, of which the target remembers all."""

    drafter: ExitDrafter
    follower: ExitFollower
    turns: Turns = field(default_factory=Turns)

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> Turn:
        """Its turn to draft `depth` tokens after the committed `tokens`, and others beside them."""
        line = self.turns.line(self.follower, tokens, self.drafter.calibration, least)
        return Turn(self.drafter, line, depth)

    def close(self, spoilt: bool) -> None:
        """It drafts no more."""
        self.follower.close()
