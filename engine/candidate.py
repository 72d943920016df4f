"""What may follow a node of a token tree. Knows nothing of MLX, so that any drafter can speak of candidates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node; `gap` is how far its score lies below the best of that node (nats, >= 0)."""

    token: int
    gap: float
