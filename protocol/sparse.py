"""What a chain was drawn from: the draft's distributions, as sparse as they were when it drew (residual sampling).

Travels with the chain, because a chain must be verified with the very q it was drawn from. Knows arrays; knows nothing
of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.protocol.fields import Ids, Probabilities

# How far a row of float32 probabilities may be from 1 in sum.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class SparseQ:
    """A distribution a token: token i was drawn from `ids[i]`, [N, m], with `probs[i]`, [N, m]; all others have 0.

    In `Branches` the rows of all entries stand one after the other.
    """

    ids: Ids
    probs: Probabilities

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.probs.nbytes

    def part(self, start: int, end: int) -> SparseQ:
        """The rows from `start` to before `end`."""
        return SparseQ(self.ids[start:end], self.probs[start:end])

    def of(self, tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """q of one token a row, float32 [N]."""
        own = self.ids == np.asarray(tokens, np.int32)[:, None]
        found: np.ndarray[tuple[int], np.dtype[np.float32]] = np.max(self.probs * own, axis=1, initial=0.0)
        return found

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether these can be distributions that these tokens were drawn from."""
        if self.ids.shape != self.probs.shape or len(self) != len(tokens):
            return False
        sums = self.probs.sum(axis=1)
        return bool((np.abs(sums - 1.0) < TOLERANCE).all() and (self.of(tokens) > 0).all())


def one_hot(tokens: Sequence[int]) -> SparseQ:
    """The q of tokens that were not drawn by chance, but could only be these."""
    ids = np.asarray(tokens, np.int32).reshape(-1, 1)
    return SparseQ(ids, np.ones(ids.shape, np.float32))
