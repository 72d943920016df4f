"""Drafting in the target's process: draft, then verify, without a hop between, for a machine with one device.

`InProcessModel`: a drafter in the target's process: draft, then verify, without a hop between, for a machine with one
device. The drafter is one of `drafting`, as in a process of its own. It can't work ahead here: draft and target take
turns.

`InProcessHead`: a head in the target's process: it reads the hidden rows of what the target verifies, and drafts in
turn with it. Stands where `colocated.InProcessModel` stands for a drafter that is a model of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.drafters.continuation import Continuation
from outrider.drafters.draft_batcher import DraftBatcher
from outrider.drafters.drafter import Drafter, DrafterFault
from outrider.drafters.fan_out import POLICIES, Calibration
from outrider.drafters.growth import BranchTask
from outrider.drafters.heads.drafter import FeatureFollower, HeadDrafter, SavedPairs
from outrider.drafters.heads.early_exit import ExitDrafter, ExitFollower
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.proposers import AlternativesHistory
from outrider.drafters.work_ahead import WorkAhead, begin, check_known
from outrider.engine.kv_cache import CacheSlot, FlatKVCache, KVCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class InProcessModel:
    """The drafter beside the target."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.batcher = DraftBatcher(drafter)
        self.calibration = Calibration()

    def session_of(
        self, slot: CacheSlot, sampling: SamplingParams, progress: Progress, constraint: Constraint | None
    ) -> Callable[[], ModelDraftSession]:
        """What opens its part of a request, which reads the text when it is first wanted."""
        return lambda: self.open(slot.tokens, sampling, progress, constraint)

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Progress | None = None,
        constraint: Constraint | None = None,
    ) -> ModelDraftSession:
        """Reads `tokens` for a request; `progress(done, total)` may raise to end that."""
        return ModelDraftSession(self, tokens, sampling, progress, constraint)


class ModelDraftSession:
    """What the drafter knows of one request. Follows the committed tokens whenever it is asked to propose."""

    def __init__(
        self,
        colocated: InProcessModel,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Progress | None,
        constraint: Constraint | None = None,
    ) -> None:
        self._drafter, self._batcher = colocated.drafter, colocated.batcher
        self._work: WorkAhead | None = None
        # Nothing is prepared for ahead of its time, so there are no tokens whose weight Saguaro's factor would lower.
        even = replace(sampling, saguaro=1.0) if sampling.is_residual else sampling
        try:
            self._work = begin(
                self._drafter,
                tokens,
                even,
                (),
                POLICIES["uniform"],
                colocated.calibration,
                progress=progress,
                constraint=constraint,
            )
        except DrafterFault as error:
            log.warning("%s", error)

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> DraftTurn:
        """Its turn to draft `depth` tokens after the committed `tokens`, which begin with those of the turn before.

        There is nothing to draft once the text is beyond what the draft knows.
        """
        return DraftTurn(self._batcher, self._follow(tokens, depth, least), depth)

    def _follow(self, tokens: Sequence[int], depth: int, least: float) -> WorkAhead | None:
        work = self._work
        if work is None:
            return None
        new = tokens[work.committed_len :]
        try:
            check_known(self._drafter, new)
        except DrafterFault as error:
            log.warning("%s", error)
            self.close(spoilt=False)
            return None
        if len(tokens) >= self._drafter.context_length:
            self.close(spoilt=False)
            return None
        work.commit(new, BranchTask(None, depth, min_prob=least))
        return work

    def close(self, spoilt: bool) -> None:
        """It drafts no more; what it has read may serve later texts, unless it is spoilt."""
        work, self._work = self._work, None
        if work is not None:
            work.tree.close(spoilt)

    def column_tokens(self) -> list[int]:
        """The token of every committed KV column, in order; must equal the committed tokens."""
        return self._work.tree.column_tokens() if self._work is not None else []


class DraftBatch(Protocol):
    """Works for several requests in forwards that they share."""

    def continuations(self, works: Sequence[Any], depths: Sequence[int]) -> Sequence[Continuation | OutriderError]:
        """What follows each one's committed text, so many tokens of it; or why there is nothing."""
        ...


@dataclass(frozen=True, slots=True)
class DraftTurn:
    """A request's turn to draft up to `depth` tokens; `work` None: there is nothing to draft."""

    batcher: DraftBatch
    work: Any
    depth: int


class DraftSession(Protocol):
    """What a drafter in this process knows of one request."""

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> DraftTurn:
        """Its turn to draft `depth` tokens after the committed `tokens`, which begin with those of the turn before.

        It may tell others beside them that hold with a probability of more than `min_prob`.
        """
        ...

    def close(self, spoilt: bool) -> None:
        """It drafts no more; `spoilt`: by a failure."""
        ...


def propose(turns: Sequence[DraftTurn]) -> list[Continuation | OutriderError]:
    """The chains of requests of one drafter, which share its forwards; or why one has none.

    A chain ends with the draft's context, and is empty from there on.
    """
    able = [(turn.work, turn.depth) for turn in turns if turn.work is not None]
    drafted = turns[0].batcher.continuations([work for work, _ in able], [depth for _, depth in able]) if turns else []
    found = iter(drafted)
    return [Continuation() if turn.work is None else next(found) for turn in turns]


class InProcessHead:
    """The head beside the target."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self.drafter = drafter

    @property
    def head(self) -> Head:
        return self.drafter.head

    def follow(self, sampling: SamplingParams, constraint: Constraint | None) -> FeatureFollower:
        """What is to hear a request's text from the first token on."""
        return self.drafter.follow(sampling, constraint)

    def session_of(self, follower: FeatureFollower, slot: CacheSlot, sampling: SamplingParams) -> HeadDraftSession:
        """Its part of the request that this follows."""
        part = HeadDraftSession(self.drafter, follower, slot)
        most = min(len(slot.tokens) + sampling.max_tokens, self.head.context_length)
        self.drafter.prompt_cache.enter(part, most)
        return part


class InProcessExit:
    """The target's early exit, which drafts in the target's texts."""

    def __init__(self, drafter: ExitDrafter) -> None:
        self.drafter = drafter

    def read(self, kv_cache: KVCache) -> None:
        """From now on it drafts in these. Raises ModelError: they share no forwards."""
        if not isinstance(kv_cache, FlatKVCache):
            raise ModelError("the target can't batch requests, which early exit needs")
        self.drafter.attach_kv_cache(kv_cache)

    def session_of(
        self, slot: CacheSlot, sampling: SamplingParams, progress: Progress, constraint: Constraint | None
    ) -> Callable[[], ExitDraftSession]:
        """What opens its part of a request, for which nothing has to be heard before."""
        return lambda: ExitDraftSession(self.drafter, self.drafter.follow_text(slot.sequence, sampling, constraint))


def beside_target(drafter: HeadDrafter) -> InProcessHead | InProcessExit:
    return InProcessExit(drafter) if isinstance(drafter, ExitDrafter) else InProcessHead(drafter)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeadDraftSession:
    """What the head knows of one request. A `prompt_cache.Source` for others that begin alike."""

    drafter: HeadDrafter
    follower: FeatureFollower
    slot: CacheSlot
    turns: AlternativesHistory = field(default_factory=AlternativesHistory)

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> DraftTurn:
        """Its turn to draft `depth` tokens after the committed `tokens`, and others beside them."""
        chain = self.turns.line(self.follower, tokens, self.drafter.calibration, least)
        return DraftTurn(self.drafter, chain, depth)

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
class ExitDraftSession:
    """What an early exit knows of one request, of which the target remembers all."""

    drafter: ExitDrafter
    follower: ExitFollower
    turns: AlternativesHistory = field(default_factory=AlternativesHistory)

    def turn(self, tokens: Sequence[int], depth: int, least: float = 1.0) -> DraftTurn:
        """Its turn to draft `depth` tokens after the committed `tokens`, and others beside them."""
        chain = self.turns.line(self.follower, tokens, self.drafter.calibration, least)
        return DraftTurn(self.drafter, chain, depth)

    def close(self, spoilt: bool) -> None:
        """It drafts no more."""
        self.follower.close()
