"""Saved prefixes of texts, found by the first tokens of a new text.

Texts that have ended become entries; the least recently used entry is dropped if memory runs short. The first columns
of a running text can be copied, too. A part of an entry can be used, unless the model keeps state that can't be
shortened. A comparison with an entry takes a microsecond or two, so there is no trie. Knows tokens and bytes; knows
nothing of requests or models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import numpy as np
from mlx.utils import tree_reduce

from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.stats import CacheUse, KvCost

log = logging.getLogger(__name__)

MIN_PREFIX_TOKENS = 16  # a shorter common prefix is not worth a copy

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A copy of a model's state after a text's first `length` tokens.

    `layers`: keys and values of each attention layer, [.., length or more, head_dim]. `states`: all other state, arrays
    or containers of arrays; it is valid for exactly this length.
    """

    length: int
    layers: tuple[tuple[Any, Any], ...]
    states: tuple[Any, ...] = ()

    @property
    def cost(self) -> KvCost:
        return KvCost(_sum_nbytes(self.states), _sum_nbytes(self.layers) // max(self.length, 1))

    @property
    def nbytes(self) -> int:
        return self.cost.of(self.length)

    def usable_tokens(self, length: int) -> int:
        """Returns how many of its tokens can be used by a text that shares the first `length`."""
        if not self.states:
            return min(length, self.length)
        return self.length if length >= self.length else 0

    def cut(self, length: int) -> Self:
        """Returns it as the prefix of `length` tokens; `layers` may still have more of them."""
        return replace(self, length=length)


class PrefixSource(Protocol):
    """A running text."""

    def shareable_tokens(self) -> Sequence[int]:
        """Returns the longest prefix of the text whose state can be copied now."""

    def save(self, length: int) -> SavedPrefix:
        """Returns a copy of the state after the first `length` of these tokens."""


@dataclass(eq=False, slots=True)
class _Entry:
    tokens: Ints
    saved: SavedPrefix


class PromptCache:
    """Entries and running texts of one model. Entries are dropped to keep both within `limit` bytes."""

    def __init__(self, cost: KvCost, limit: int = 0) -> None:
        """`cost`: the memory of a text. With a `limit` of 0 the cache is off, until `set_limit`."""
        self.cost = cost
        self._limit = limit
        self._entries: list[_Entry] = []  # the least recently used first
        self._bytes = 0
        self._running: WeakKeyDictionary[PrefixSource, int] = WeakKeyDictionary()
        self._lookups = self._hits = self._tokens_saved = 0

    @property
    def use(self) -> CacheUse:
        return CacheUse(len(self._entries), self._bytes, self._lookups, self._hits, self._tokens_saved)

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    def set_limit(self, limit: int) -> None:
        """Sets the limit, in bytes."""
        self._limit = limit
        self._make_room()

    def enter(self, source: PrefixSource, most: int) -> None:
        """Adds a running text that will grow to `most` tokens; drops entries to make room for it."""
        self._running[source] = self.cost.of(most)
        self._make_room()

    def leave(self, source: PrefixSource) -> None:
        """Removes a running text and frees its bytes."""
        self._running.pop(source, None)

    def find(self, tokens: Sequence[int]) -> SavedPrefix | None:
        """Returns the longest saved prefix of these tokens except for the last one, which has to be fed."""
        if not self._limit:
            return None
        wanted = np.array(tokens[:-1], np.int32)
        self._lookups += 1
        lengths = [entry.saved.usable_tokens(common_prefix_length(entry.tokens, wanted)) for entry in self._entries]
        length = max(lengths, default=0)
        source, lent = self._find_source(wanted)
        if max(length, lent) < MIN_PREFIX_TOKENS:
            return None
        self._hits += 1
        self._tokens_saved += max(length, lent)
        if source is not None and lent > length:
            return source.save(lent)
        latest = max(place for place, usable in enumerate(lengths) if usable == length)
        self._entries.append(self._entries.pop(latest))  # the most recently used
        return self._entries[-1].saved.cut(length)

    def wants(self, tokens: Sequence[int]) -> bool:
        """Returns whether `store` would make an entry of a text with these tokens."""
        if len(tokens) < MIN_PREFIX_TOKENS or not 0 < self.cost.of(len(tokens)) <= self._limit:
            return False
        known = np.array(tokens, np.int32)
        return all(
            entry.saved.usable_tokens(common_prefix_length(entry.tokens, known)) < len(known) for entry in self._entries
        )

    def store(self, tokens: Sequence[int], copy: Callable[[int], SavedPrefix]) -> None:
        """Makes an entry of a text with these tokens, unless another entry has all of them. `copy` copies the state
        after so many tokens, or fewer; if that fails, as without memory, there is no entry."""
        if not self.wants(tokens):
            return
        try:
            with wrap_model_errors("copying to the prompt cache"):
                saved = copy(len(tokens))
        except OutriderError as error:
            log.warning("%s; the text is not cached", error)
            return
        known = np.array(tokens[: saved.length], np.int32)
        if not self.wants(tokens[: saved.length]) or saved.nbytes > self._limit:
            return
        for entry in list(self._entries):
            if not saved.states and common_prefix_length(entry.tokens, known) == entry.saved.length:
                self._drop(entry)  # the new entry has all its tokens
        self._entries.append(_Entry(known, saved))
        self._bytes += saved.nbytes
        self._make_room()

    def _find_source(self, wanted: Ints) -> tuple[PrefixSource | None, int]:
        lengths = {
            source: common_prefix_length(np.array(source.shareable_tokens(), np.int32), wanted)
            for source in self._running
        }
        lender = max(lengths, key=lengths.__getitem__, default=None)
        return lender, lengths[lender] if lender is not None else 0

    def _make_room(self) -> None:
        room = self._limit - sum(self._running.values())
        while self._entries and self._bytes > room:
            self._drop(self._entries[0])

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._bytes -= entry.saved.nbytes


def common_prefix_length(left: Ints, right: Ints) -> int:
    """Returns the length of the common prefix of two texts."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if len(differ) else count


def _sum_nbytes(arrays: Any) -> int:
    """Returns the size of all arrays in nested containers."""
    return int(tree_reduce(lambda total, leaf: total + getattr(leaf, "nbytes", 0), arrays, 0))
