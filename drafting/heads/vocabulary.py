"""A head's own tokens, where it knows fewer than its target, by the target's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from outrider.protocol.errors import CannotDraft


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """`ids` [V_d]: the target's name of each of the head's tokens; None: they are the target's `size` tokens.

    `numbers` [size]: the head's of each of the target's, 0 for one that it does not know.
    """

    size: int
    ids: mx.array | None = None
    numbers: mx.array | None = None

    @classmethod
    def read(cls, d2t: mx.array | None, count: int, size: int, name: str) -> DraftVocabulary:
        """By `d2t` [count], what each number is to be raised by. Raises CannotDraft: it is another target's."""
        if d2t is None:
            if count > size:
                raise CannotDraft(f"{name} has {count} tokens and this target {size}; expected a head for this target")
            return cls(size) if count == size else cls._of(size, mx.arange(count))
        if d2t.shape != (count,):
            raise CannotDraft(f"{name} maps {d2t.shape} tokens and its config says {count}; download the head again")
        ids = mx.arange(count) + d2t.astype(mx.int32)
        known = cast("list[int]", ids.tolist())
        if min(known) < 0 or max(known) >= size:
            raise CannotDraft(f"{name} knows tokens beyond this target's {size}; expected a head for its vocabulary")
        return cls._of(size, ids)

    @classmethod
    def _of(cls, size: int, ids: mx.array) -> DraftVocabulary:
        numbers = mx.zeros((size,), mx.int32)
        numbers[ids] = mx.arange(ids.shape[0])
        return cls(size, ids, numbers)

    @property
    def known(self) -> int:
        """How many tokens the head has."""
        return self.size if self.ids is None else int(self.ids.shape[0])

    def spread(self, own: mx.array) -> mx.array:
        """Logits [R, V] of the head's own [R, V_d]; -inf for tokens that it does not know."""
        if self.ids is None:
            return own
        whole = mx.full((own.shape[0], self.size), -mx.inf)
        whole[:, self.ids] = own
        return whole

    def own(self, tokens: mx.array) -> mx.array:
        """The head's numbers of tokens that it knows."""
        return tokens if self.numbers is None else self.numbers[tokens]
