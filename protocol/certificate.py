"""What a teacher-forced replay found: written by `target_worker.certificate`, read by `outrider verify`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """At absolute `position` the target says `expected` and the output has `token`, `margin` below it in score.

    A token outside the target's top-p, min-p or top-k has no score: its margin is None unless the border explains it.
    """

    position: int
    token: int
    expected: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """`positions` tokens replayed, `identical` as the target alone says; what differs is a tie or a mismatch.

    Below `tolerance` a difference is one that rounding explains.
    """

    positions: int
    identical: int
    ties: tuple[Difference, ...]
    mismatches: tuple[Difference, ...]
    tolerance: float

    @property
    def holds(self) -> bool:
        return not self.mismatches
