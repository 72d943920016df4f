"""A fresh drafter's proposal: one ordinary forward over the whole text, without cache and tree.

A token that differs by less than rounding explains is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.protocol.sampling import SamplingParams

TIE = 5e-4


@dataclass(frozen=True, slots=True)
class Doubt:
    """At `position` the chain has `token`, `margin` below the best score."""

    position: int
    token: int
    margin: float


def fresh_scores(model: LoadedModel, text: Sequence[int], rows: int, sampling: SamplingParams) -> np.ndarray:
    """Scores [rows, V] of what follows each of the last `rows` tokens of `text`."""
    logits = model.model(mx.array([list(text)]))[0, -rows:]
    positions = range(len(text) - rows + 1, len(text) + 1)
    return np.array(Sampler(sampling, model.vocab_size).scores(logits, positions, [text[:p] for p in positions]))


def doubts(model: LoadedModel, text: Sequence[int], chain: Sequence[int], sampling: SamplingParams) -> list[Doubt]:
    """The tokens of `chain` that a fresh drafter would not have said after `text` and those before them."""
    if not chain:
        return []
    scores = fresh_scores(model, [*text, *chain[:-1]], len(chain), sampling)
    margins = scores.max(axis=-1) - scores[np.arange(len(chain)), list(chain)]
    return [
        Doubt(len(text) + i, chain[i], float(margin))
        for i, margin in enumerate(margins)
        if chain[i] != int(scores[i].argmax())
    ]


def only_ties(found: Sequence[Doubt]) -> bool:
    return all(doubt.margin < TIE for doubt in found)
