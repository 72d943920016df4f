"""Draft logits to scores: the sampling contract of the engine, on the CPU, numpy in and out.

The CPU, because on a Mac the GPU is the target's. Belongs to the thread that first uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.sampling import Sampler
from protocol.sampling import SamplingParams


class Scorer:
    """Scores of one request's nodes: argmax is the drafter's choice (see engine.sampling)."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._sampler = Sampler(params, vocab_size, normalised=False)

    @property
    def needs_history(self) -> bool:
        return self._sampler.needs_history

    def scores(
        self, logits: NDArray[np.float32], positions: Sequence[int], histories: Sequence[Sequence[int]] | None
    ) -> NDArray[np.float32]:
        """[R, V] for the tokens that come at `positions`, one row of `logits` [R, V] each."""
        with mx.stream(mx.cpu):
            return np.array(self._sampler.scores(mx.array(logits), positions, histories))
