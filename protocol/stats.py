"""The numbers that processes report about themselves: memory, counts and durations.

`KvCost`: what texts cost in memory: keys, values and state of a model, in bytes, and what a prompt cache has made of
its room. Knows numbers only; a worker measures them, the orchestrator adds them up.

`Tally`: what a process has counted since it started, as it tells others: how often, and how long. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.schema import Count, Name, Serial


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes that a worker remembers of a text: `per_text` however long it is, and `per_token` more for each token."""

    per_text: Serial = 0
    per_token: Serial = 0

    def of(self, tokens: int) -> int:
        """Bytes of a text of so many tokens."""
        return self.per_text + tokens * self.per_token

    def __add__(self, other: KvCost) -> KvCost:
        return KvCost(self.per_text + other.per_text, self.per_token + other.per_token)


@dataclass(frozen=True, slots=True)
class KvUse:
    """Of the `limit` bytes for texts in all workers together, running ones take `used` as long as they are by now, and
    `reserved` when they are as long as they may get."""

    limit: Serial = 0
    used: Serial = 0
    reserved: Serial = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A worker's prompt cache: it holds `entries` texts in `bytes`; of `lookups` texts that began, `hits` found
    something there or in a running text, `tokens_saved` in all that were not read again."""

    entries: Count = 0
    bytes: Serial = 0
    lookups: Count = 0
    hits: Count = 0
    tokens_saved: Serial = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """What `name` stands for happened `count` times."""

    name: Name
    count: Serial


@dataclass(frozen=True, slots=True)
class Durations:
    """`counts[i]` lasted at most `bounds[i]` seconds and longer than the bound before, the last count longer than all;
    `seconds` in all."""

    bounds: tuple[float, ...] = ()
    counts: tuple[Serial, ...] = ()
    seconds: float = 0.0
