"""Texts that several ranks remember, each its part: rank 0's deeds are told to the others, who do the same.

A sharded layer is a sum over ranks, so all have to make the same forwards in the same order, of the same texts. What
chooses tokens stays on rank 0; a token that is not read yet comes to the others through the collective. Each forward is
put under way at once and as a whole: what is computed later, or not at all, would leave the ranks out of step. Knows
`KVCache` and words; nothing of sockets.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

import mlx.core as mx

from outrider.engine.hidden_states import HiddenStates
from outrider.engine.kv_cache import CachedSequence, Feed, KVCache
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.engine.ranks import Ranks
from outrider.protocol.errors import OutriderError, named_errors
from outrider.protocol.messages import TextChange, TextFeed, TextForward
from outrider.protocol.stats import KvCost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedCopy(SavedPrefix):
    """Rank 0's part of a copy that all have, `here` of them on this machine; they call it `number`."""

    number: int = 0
    here: int = 1

    @property
    def cost(self) -> KvCost:
        """What it takes on this machine."""
        own = SavedPrefix(self.length, self.layers, self.states).cost
        return KvCost(self.here * own.per_text, self.here * own.per_token)


class MirroredSequence:
    """A text of rank 0's that all ranks call `number`."""

    def __init__(self, own: CachedSequence, number: int, note: Callable[[TextChange], None]) -> None:
        self.own, self.number, self._send_change = own, number, note

    @property
    def length(self) -> int:
        return self.own.length

    @length.setter
    def length(self, length: int) -> None:
        self._send_change(TextChange("set", self.number, length))
        self.own.length = length

    @property
    def exact(self) -> bool:
        return self.own.exact

    @property
    def marks_freely(self) -> bool:
        return self.own.marks_freely

    def mark(self) -> None:
        if not self.exact:
            self._send_change(TextChange("mark", self.number))
        self.own.mark()

    def roll_back(self, length: int) -> None:
        if length < self.length:
            self._send_change(TextChange("roll back", self.number, length))
        self.own.roll_back(length)


class MirroredKVCache:
    """Rank 0's side: its own texts, and `tell`, by which the others hear what is done. `here`: see `SharedCopy`.

    Only forwards can't wait, so the others hear everything else together with the next one.
    """

    def __init__(self, own: KVCache, ranks: Ranks, tell: Callable[..., None], here: int = 1) -> None:
        self._own, self._ranks, self._send, self._here = own, ranks, tell, here
        self._numbers, self._copies = itertools.count(), itertools.count(1)
        self._pending_changes: list[TextChange] = []
        self._dropped: deque[int] = deque()  # a copy may be let go at any moment, on any thread

    @property
    def together(self) -> bool:
        return self._own.together

    @property
    def is_lazy(self) -> bool:
        return self._own.is_lazy

    @property
    def trees(self) -> bool:
        """A path through a tree is no length, and nothing else is told to the other ranks."""
        return False

    def open(self) -> MirroredSequence:
        sequence = MirroredSequence(self._own.open(), next(self._numbers), self._pending_changes.append)
        self._pending_changes.append(TextChange("open", sequence.number))
        return sequence

    def close(self, sequence: MirroredSequence) -> None:
        self._pending_changes.append(TextChange("close", sequence.number))
        self._own.close(sequence.own)

    def save(self, sequence: MirroredSequence, length: int) -> SavedPrefix:
        number = next(self._copies)
        self._pending_changes.append(TextChange("save", sequence.number, length, number))
        own = self._own.save(sequence.own, length)
        copy = SharedCopy(own.length, own.layers, own.states, number, self._here)
        finalize(copy, self._dropped.append, number).atexit = False
        return copy

    def adopt(self, sequence: MirroredSequence, start: CachedPrefix) -> None:
        number = start.saved.number if isinstance(start.saved, SharedCopy) else 0
        self._pending_changes.append(TextChange("adopt", sequence.number, start.length, number))
        self._own.adopt(sequence.own, start)

    def tap_hidden_states(self, hidden_states: HiddenStates) -> None:
        """Hidden rows are the same on all ranks; only this one's are read."""
        self._own.tap_hidden_states(hidden_states)

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        while self._dropped:
            self._pending_changes.append(TextChange("drop", copy=self._dropped.popleft()))
        self._send(*self._pending_changes, TextForward(tuple(map(_told, feeds))))
        self._pending_changes.clear()
        return _begun(self._own, [replace(f, sequence=f.sequence.own, tokens=self._tokens(f)) for f in feeds])

    def state(self) -> list[Any]:
        return self._own.state()

    def _tokens(self, feed: Feed) -> Sequence[int] | mx.array:
        unread = isinstance(feed.tokens, mx.array)
        return self._ranks.from_first(feed.tokens.astype(mx.int32)) if unread else feed.tokens  # type: ignore[union-attr]


class RankFollower:
    """Another rank's side: does with its own texts what rank 0 tells."""

    def __init__(self, own: KVCache, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._sequences: dict[int, Any] = {}
        self._copies: dict[int, SavedPrefix] = {}

    def forward(self, told: TextForward) -> None:
        """Puts the same forward under way. Where the model's code refuses it, it does so on rank 0 as well."""
        feeds = [Feed(self._sequences[f.text], self._tokens(f), f.wanted, f.prompt) for f in told.feeds]
        try:
            with named_errors("a rank's forward"):
                _begun(self._own, feeds)
        except OutriderError as error:
            log.warning("%s; rank 0 tells whose request that was", error)

    def change(self, told: TextChange) -> None:
        """Does what rank 0 did; what that one was refused is refused here, too."""
        try:
            self._do(told)
        except OutriderError as error:
            log.warning("%s; rank 0 tells whose request that was", error)

    def _do(self, told: TextChange) -> None:
        match told.deed:
            case "open":
                self._sequences[told.text] = self._own.open()
            case "close":
                self._own.close(self._sequences.pop(told.text))
            case "mark":
                self._sequences[told.text].mark()
            case "roll back":
                self._sequences[told.text].roll_back(told.length)
            case "set":
                self._sequences[told.text].length = told.length
            case "save":
                self._copies[told.copy] = self._own.save(self._sequences[told.text], told.length)
            case "adopt":
                self._own.adopt(self._sequences[told.text], CachedPrefix(self._copies[told.copy], told.length))
            case "drop":
                self._copies.pop(told.copy, None)

    def _tokens(self, feed: TextFeed) -> Sequence[int] | mx.array:
        return feed.tokens or self._ranks.from_first(mx.zeros(feed.count, mx.int32))


def _told(feed: Feed) -> TextFeed:
    tokens = () if isinstance(feed.tokens, mx.array) else tuple(feed.tokens)
    return TextFeed(feed.sequence.number, tokens, feed.count, feed.wanted, feed.prompt)


def _begun(kv_cache: KVCache, feeds: Sequence[Feed]) -> mx.array:
    logits = kv_cache.forward(feeds)
    mx.async_eval(logits, kv_cache.state())  # type: ignore[no-untyped-call]
    return logits
