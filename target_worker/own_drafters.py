"""The drafters in the target's process, by name: a round that drafts here names one of them.

Heads among them read the same forwards, whoever drafts; what a drafter that is not asked reads or keeps is its own
affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx

from outrider.drafting.heads.follower import Follower
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.readers import Reader, Readers
from outrider.engine.slots import Listener, Slot
from outrider.engine.taps import Taps
from outrider.engine.texts import Texts
from outrider.grammar.constraint import Constraint
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.colocated import Colocated, Part, Progress
from outrider.target_worker.own_head import ColocatedExit, ColocatedHead

OwnDrafter = Colocated | ColocatedHead | ColocatedExit


class OwnDrafters:
    """Any number of them, none too; the first is asked where nobody is named."""

    def __init__(self, drafters: Mapping[str, OwnDrafter]) -> None:
        self._drafters = dict(drafters)
        self._heads = {name: one for name, one in drafters.items() if isinstance(one, ColocatedHead)}
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

    def read(self, model: LoadedModel, texts: Texts, other: Reader | None = None) -> None:
        """From now on heads can read what these texts of the target think, and so can an `other`, behind them."""
        for one in self._drafters.values():
            if isinstance(one, ColocatedExit):
                one.read(texts)
        self._readers = self._all_readers(other)
        if self._heads or other is not None:
            texts.tap(Taps(model.model, self._readers.points, self._readers.fuse))

    def parts_of(
        self,
        slot: Slot,
        sampling: SamplingParams,
        progress: Progress,
        constraint: Callable[[], Constraint | None],
        other: Listener | None = None,
    ) -> dict[str, Callable[[], Part]]:
        """What opens each one's part of a request; a head hears from the first token on, opened or not.

        `constraint` makes one for each: it stands where its drafter is in the text. `other`: hears what the other
        reader reads.
        """
        followers = {name: head.follow(sampling, constraint()) for name, head in self._heads.items()}
        hearers = [follower.hear for follower in followers.values()] + ([other] if other is not None else [])
        if hearers:
            slot.listener = self._listener(hearers)
        if followers:
            slot.begins_at = partial(_begins_at, slot, list(followers.values()))
        found: dict[str, Callable[[], Part]] = {}
        for name, one in self._drafters.items():
            if isinstance(one, ColocatedHead):
                found[name] = partial(one.part_of, followers[name], slot, sampling)
            else:
                found[name] = one.part_of(slot, sampling, progress, constraint())
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

    def _all_readers(self, other: Reader | None = None) -> Readers:
        own = [Reader(one.head.points, one.head.fuse) for one in self._heads.values()]
        return Readers(own + ([other] if other is not None else []))

    def _listener(self, hearers: Sequence[Listener]) -> Listener:
        def hear(position: int, features: mx.array) -> None:
            for hears, own in zip(hearers, self._readers.apart(features), strict=False):
                hears(position, own)

        return hear


def _begins_at(slot: Slot, followers: Sequence[Follower], length: int) -> int:
    """From which token on the target should read, which remembers so many: what one head lacks all hear again."""
    for _ in range(2):  # who was asked first is told what the others have made of it
        for follower in followers:
            length = follower.begin(slot.tokens, length, slot.text.exact)
    return length
