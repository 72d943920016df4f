"""The drafters in the target's process: loaded at its start, known by name; a round that drafts here names one of
them.

Heads among them read the same forwards, whoever drafts; what a drafter that is not asked reads or keeps is its own
affair.

`DrafterSpec`: loads the drafters of the target's process. One that can't be used is left out, with a sentence, and ends
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from outrider.drafters.heads import load as heads
from outrider.drafters.heads.drafter import FeatureFollower, HeadDrafter
from outrider.drafters.heads.pairing import step_cost
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.hidden_states import HiddenStateReader, HiddenStateReaders, HiddenStates
from outrider.engine.kv_cache import CacheSlot, KVCache, Listener
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError, named_errors
from outrider.protocol.heads import DRAFT_MODEL
from outrider.protocol.messages import workers
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.target_worker.in_process_drafter import (
    DraftSession,
    InProcessExit,
    InProcessHead,
    InProcessModel,
    Progress,
    beside_target,
)

InProcessProposer = InProcessModel | InProcessHead | InProcessExit


class InProcessDrafters:
    """Any number of them, none too; the first is asked where nobody is named."""

    def __init__(self, drafters: Mapping[str, InProcessProposer]) -> None:
        self._drafters = dict(drafters)
        self._heads = {name: one for name, one in drafters.items() if isinstance(one, InProcessHead)}
        self._readers = self._all_readers()

    @property
    def weight_bytes(self) -> int:
        return sum(one.drafter.weight_bytes for one in self._drafters.values())

    @property
    def cost(self) -> KvCost:
        """What they keep of a text, together."""
        return sum((cache.cost for cache in self._caches), KvCost())

    @property
    def reads(self) -> bool:
        """Whether a head among them has to see what the target thinks of a text."""
        return bool(self._heads)

    def read(self, model: LoadedModel, kv_cache: KVCache, other: HiddenStateReader | None = None) -> None:
        """From now on heads can read what these texts of the target think, and so can an `other`, behind them."""
        for one in self._drafters.values():
            if isinstance(one, InProcessExit):
                one.read(kv_cache)
        self._readers = self._all_readers(other)
        if self._heads or other is not None:
            kv_cache.tap_hidden_states(HiddenStates(model.model, self._readers.points, self._readers.fuse))

    def sessions_of(
        self,
        slot: CacheSlot,
        sampling: SamplingParams,
        progress: Progress,
        constraint: Callable[[], Constraint | None],
        other: Listener | None = None,
    ) -> dict[str, Callable[[], DraftSession]]:
        """What opens each one's part of a request; a head hears from the first token on, opened or not.

        `constraint` makes one for each: it stands where its drafter is in the text. `other`: hears what the other
        reader reads.
        """
        followers = {name: head.follow(sampling, constraint()) for name, head in self._heads.items()}
        hearers = [follower.add_features for follower in followers.values()] + ([other] if other is not None else [])
        if hearers:
            slot.listener = self._listener(hearers)
        if followers:
            slot.begins_at = partial(_begins_at, slot, list(followers.values()))
        found: dict[str, Callable[[], DraftSession]] = {}
        for name, one in self._drafters.items():
            if isinstance(one, InProcessHead):
                found[name] = partial(one.session_of, followers[name], slot, sampling)
            else:
                found[name] = one.session_of(slot, sampling, progress, constraint())
        return found

    def allow(self, limit: int, context: int, whole: KvCost) -> int:
        """Takes their share of `limit` bytes, by what a text takes here of the `whole`; what they leave."""
        left = limit
        for cache in self._caches:
            share = limit * cache.cost.of(context) // max(whole.of(context), 1)
            cache.allow(share)
            left -= share
        return left

    @property
    def _caches(self) -> list[PromptCache]:
        return [one.drafter.prompt_cache for one in self._drafters.values()]

    def _all_readers(self, other: HiddenStateReader | None = None) -> HiddenStateReaders:
        own = [HiddenStateReader(one.head.points, one.head.fuse) for one in self._heads.values()]
        return HiddenStateReaders(own + ([other] if other is not None else []))

    def _listener(self, hearers: Sequence[Listener]) -> Listener:
        def hear(position: int, features: mx.array) -> None:
            for hears, own in zip(hearers, self._readers.apart(features), strict=False):
                hears(position, own)

        return hear


def _begins_at(slot: CacheSlot, followers: Sequence[FeatureFollower], length: int) -> int:
    """From which token on the target should read, which remembers so many: what one head lacks all hear again."""
    for _ in range(2):  # who was asked first is told what the others have made of it
        for follower in followers:
            length = follower.begin(slot.tokens, length, slot.sequence.exact)
    return length


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter to have: its `name`, its `kind`, which is of `protocol.heads.HEADS` or a model's, and its files."""

    name: str
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """The drafters that are there, by name, and a sentence for each that is not."""

    drafters: Mapping[str, InProcessProposer]
    infos: tuple[workers.InProcessDrafter, ...] = ()
    left_out: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


Cost = Callable[[HeadDrafter, LoadedModel], float | None]


def load(
    wanted: Sequence[DrafterSpec],
    model: LoadedModel,
    progress: Callable[[str], None],
    alone: bool,
    cost: Cost | None = step_cost,
) -> LoadedDrafters:
    """`alone`: the model is whole in this process, see `drafters.heads.load`; a head's `cost` is then tried, if given:
    on a machine that stands in for another it says nothing."""
    found: dict[str, InProcessProposer] = {}
    told, left_out, doubts = [], [], []
    for one in wanted:
        try:
            drafter = _loaded(one, model, progress, alone)
        except OutriderError as error:
            left_out.append(f"drafter {one.name} is not used: {error}")
            continue
        found[one.name] = drafter
        doubts += [drafter.drafter.note] if drafter.drafter.note else []
        told.append(_told(one, drafter, model, cost if alone else None))
    return LoadedDrafters(found, tuple(told), tuple(left_out), tuple(doubts))


def _loaded(wanted: DrafterSpec, model: LoadedModel, progress: Callable[[str], None], alone: bool) -> InProcessProposer:
    if wanted.kind == DRAFT_MODEL:
        return InProcessModel(MlxDrafter.load(wanted.path, progress))
    return beside_target(heads.load(wanted.kind, wanted.path, model, progress, alone))


def _told(
    wanted: DrafterSpec, drafter: InProcessProposer, model: LoadedModel, cost: Cost | None
) -> workers.InProcessDrafter:
    is_head = not isinstance(drafter, InProcessModel)
    agreement = None if isinstance(drafter, InProcessModel) else drafter.drafter.agreement
    return workers.InProcessDrafter(
        wanted.name,
        wanted.path,
        is_head,
        -1.0 if agreement is None else agreement,
        _weight(drafter, model, cost),
    )


def _weight(drafter: InProcessProposer, model: LoadedModel, cost: Cost | None) -> float:
    tried = None
    if cost is not None and isinstance(drafter, InProcessHead):
        try:
            with named_errors("measuring the head"):
                tried = cost(drafter.drafter, model)
        except OutriderError as error:
            log.warning("%s; its weights tell", error)
    return drafter.drafter.weight_bytes / max(model.weight_bytes, 1) if tried is None else tried
