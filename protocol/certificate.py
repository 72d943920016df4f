"""What a teacher-forced replay found: written by `target_worker.certificate`, read by `outrider verify`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """At absolute `position` the target says `expected` and the output has `token`.

    `margin` is by how much the target's logits would have to differ for `token` to be chosen, `tolerance` what rounding
    may make them differ by there. A token that the target's top-p, min-p or top-k rule out has no margin.
    """

    position: int
    token: int
    expected: int
    margin: float | None
    tolerance: float


@dataclass(frozen=True, slots=True)
class Report:
    """`positions` tokens replayed, `identical` as the target alone says; what differs is a tie or a mismatch.

    A tie is a difference that rounding explains. `context_length` is where the target's text must end.
    """

    positions: int
    identical: int
    ties: tuple[Difference, ...]
    mismatches: tuple[Difference, ...]
    context_length: int

    @property
    def holds(self) -> bool:
        return not self.mismatches
