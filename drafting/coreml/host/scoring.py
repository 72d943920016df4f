"""Draft logits to the steps of a token tree: the engine's sampling contract and draws, on the CPU.

The CPU, because on a Mac the GPU is the target's. Steps are read to the end on the thread that makes them, so that
another thread may ask them what they know.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.engine.draws import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Asked, Step, score
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams


class Scorer:
    """One request's scores; with `draws` a row's own token is drawn from a q, without it is the best."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, draws: Draws | None, constraint: Constraint | None
    ) -> None:
        self._sampler = Sampler(params, vocab_size, normalised=False, constraint=constraint)
        self._draws = draws

    @property
    def reach(self) -> int:
        """How many tokens before a row its scores depend on; 0 for none."""
        return self._sampler.reach if self._sampler.needs_history else 0

    def step(
        self,
        logits: NDArray[np.float32],
        positions: Sequence[int],
        histories: Sequence[Sequence[int]] | None,
        forks: Sequence[int],
    ) -> Step:
        """The step for the tokens at `positions`, one row of `logits` [R, V] each; `forks` as in engine.draws."""
        with mx.stream(mx.cpu):
            rows, asked = mx.array(logits), Asked(self._sampler, positions, histories)
            step = score([asked], rows) if self._draws is None else self._draws.score(asked, rows, forks)
            step.best()
        return step
