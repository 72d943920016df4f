"""A committed text that a head drafts behind, and what it has chosen there so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import mlx.core as mx

from outrider.drafting.heads.pairs import PairFeed
from outrider.drafting.work_ahead import Continuation
from outrider.engine.flat_rows import FlatText
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Asked, score
from outrider.protocol.sparse import one_hot


class Followed(Protocol):
    """A text that a head follows: what it has read of it, and what it is still to read."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def text(self) -> FlatText: ...

    @property
    def length(self) -> int: ...

    def is_up_to(self, tokens: Sequence[int]) -> bool: ...

    def catch_up(self, tokens: Sequence[int]) -> PairFeed: ...

    def has_read(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Line:
    """A committed text, and the chain that grows behind it to `depth` tokens: `picks` are rows of what was chosen."""

    follower: Followed
    tokens: Sequence[int]
    depth: int = 0
    picks: list[tuple[mx.array, int]] = field(default_factory=list)

    @property
    def chain(self) -> tuple[int, ...]:
        """What was chosen. Waits."""
        return tuple(cast("list[int]", chosen.tolist())[row] for chosen, row in self.picks)

    def asked(self, count: int = 1) -> Asked:
        """How its next tokens are chosen; one where the choice looks at those before."""
        sampler, history = self.follower.sampler, None
        if sampler.needs_history:
            history = [[*self.tokens, *self.chain][-sampler.reach :]]
        begin = len(self.tokens) + len(self.picks)
        return Asked(sampler, range(begin, begin + count), history)

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        drawn = self.follower.sampler.params.is_residual and chain
        return Continuation(chain, one_hot(chain) if drawn else None)


def choose(lines: Sequence[Line], logits: mx.array) -> mx.array:
    """Each line's next token [R] by its row of logits [R, V]; those that ask for the same are scored together."""
    groups: dict[Hashable, list[int]] = {}
    for row, line in enumerate(lines):
        groups.setdefault(line.follower.sampler.kind, []).append(row)
    parts, order = [], [row for rows in groups.values() for row in rows]
    for rows in groups.values():
        own = logits if len(groups) == 1 else mx.take(logits, mx.array(rows, mx.int32), axis=0)
        parts.append(score([lines[row].asked() for row in rows], own).chosen())
    if len(parts) == 1:
        return parts[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return mx.take(mx.concatenate(parts), mx.array(back, mx.int32))
