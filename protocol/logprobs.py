"""How likely the target found its tokens: what OUTCOME and the chunks of a request that asked for it carry.

Knows arrays; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.protocol.fields import Floats, Ids

NEVER = float(np.finfo(np.float32).min)
"""Stands for the log-probability of what can't be."""


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """A row a token, [N, 1 + n]: the token itself, then the n likeliest of its place, the likeliest first.

    `values` are natural logarithms of the target's own probabilities after penalties, bias and grammar, before
    temperature and filters; -3.4e38 is a token that can't be.
    """

    ids: Ids
    values: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> Logprobs:
        """The rows from `start` to before `end`."""
        return Logprobs(self.ids[start:end], self.values[start:end])


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """The rows of all of these, which have as many columns."""
    return Logprobs(np.concatenate([p.ids for p in parts]), np.concatenate([p.values for p in parts]))
