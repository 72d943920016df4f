"""The numbers that processes report: memory, counts, durations, and the claim and report of a replay.

Workers measure `KvCost` and `CacheUse`; the orchestrator adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self

from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Count, Many, Real, Record, Serial

MAX_COUNTED_NAMES = 256
DURATION_BOUNDS_MS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)


def add_counts(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    """Adds counts name by name. Keeps the latest `MAX_COUNTED_NAMES`: drafters with new names may keep joining."""
    kept = [*(name for name in left if name not in right), *right][-MAX_COUNTED_NAMES:]
    return {name: left.get(name, 0) + right.get(name, 0) for name in kept}


def _add(left: Any, right: Any) -> Any:
    match left:
        case bool():
            return left or right
        case tuple():
            return tuple(map(sum, zip_longest(left, right, fillvalue=0)))
        case dict():
            return add_counts(left, right)
    return left + right


class StatsRecord(Record, frozen=True):
    """A record that is added field by field: numbers, tuples item by item (missing items count as 0), counts name by
    name, and flags, of which one is enough."""

    def __add__(self, other: Self) -> Self:
        names = self.__struct_fields__
        return type(self)(**{name: _add(getattr(self, name), getattr(other, name)) for name in names})


class KvCost(StatsRecord, frozen=True):
    """Bytes of keys, values and state that a worker needs for a text: `per_text` for any length, plus `per_token` for
    each token. `padded`: each text takes as much as the longest that runs."""

    per_text: Serial = 0
    per_token: Serial = 0
    padded: bool = False

    def of(self, tokens: int) -> int:
        """Returns the bytes of a text of `tokens` tokens."""
        return self.per_text + tokens * self.per_token

    def of_all(self, lengths: Sequence[int]) -> int:
        """Returns the bytes of texts of these lengths together."""
        return len(lengths) * self.of(max(lengths, default=0)) if self.padded else sum(map(self.of, lengths))


class KvUse(StatsRecord, frozen=True):
    """Memory for texts in all workers together: of `limit` bytes, running texts take `used` at their present length and
    `reserved` at their maximum length."""

    limit: Serial = 0
    used: Serial = 0
    reserved: Serial = 0


class CacheUse(Record, frozen=True):
    """A worker's prompt cache: `entries` texts in `bytes`. Of `lookups` texts that started, `hits` found a prefix in it
    or in a running text, which saved reading `tokens_saved` tokens in all."""

    entries: Count = 0
    bytes: Serial = 0
    lookups: Count = 0
    hits: Count = 0
    tokens_saved: Serial = 0


class Durations(StatsRecord, frozen=True):
    """A histogram since the process started: `counts[i]` durations were at most `DURATION_BOUNDS_MS[i]` and longer than
    the previous bound; the last count is of those longer than all bounds. `seconds` is the sum of all durations."""

    counts: Many[Serial] = ()
    seconds: Real = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """At absolute `position` the target chooses `expected` and the output has `token`.

    `margin`: by how much the target's logits would have to differ to choose `token`; None for a token that top-p, min-p
    or top-k exclude. `tolerance`: by how much rounding can change them.
    """

    position: int
    token: int
    expected: int
    margin: float | None
    tolerance: float


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim that `model` samples `generated` after `tokens` with `sampling`; `ends`: end tokens for a grammar."""

    model: str
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    sampling: SamplingParams
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """`positions` tokens were replayed, `identical` of them are the target's own; the others are ties or mismatches.

    A tie is a difference within rounding. `context_length`: the target's, where a text must end. Sent to `outrider
    verify`.
    """

    positions: int
    identical: int
    ties: tuple[Difference, ...]
    mismatches: tuple[Difference, ...]
    context_length: int

    @property
    def holds(self) -> bool:
        return not self.mismatches
