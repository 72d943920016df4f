"""Compares drafts with those of a fresh drafter: one forward over the whole text, without a cache and a tree.

A difference that rounding explains is a tie.
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
class Mismatch:
    """At `position` the chain has `token`, whose score is `margin` below the best one."""

    position: int
    token: int
    margin: float


def fresh_scores(model: LoadedModel, text: Sequence[int], rows: int, sampling: SamplingParams) -> np.ndarray:
    """Returns the scores [rows, V] of the tokens after each of the last `rows` tokens of `text`."""
    logits = model.model(mx.array([list(text)]))[0, -rows:]
    positions = range(len(text) - rows + 1, len(text) + 1)
    return np.array(Sampler(sampling, model.vocab_size).scores(logits, positions, [text[:p] for p in positions]))


def mismatches(
    model: LoadedModel, text: Sequence[int], chain: Sequence[int], sampling: SamplingParams
) -> list[Mismatch]:
    """Returns the tokens of `chain` that a fresh drafter would not draft after `text` and the tokens before them."""
    if not chain:
        return []
    scores = fresh_scores(model, [*text, *chain[:-1]], len(chain), sampling)
    margins = scores.max(axis=-1) - scores[np.arange(len(chain)), list(chain)]
    return [
        Mismatch(len(text) + i, chain[i], float(margin))
        for i, margin in enumerate(margins)
        if chain[i] != int(scores[i].argmax())
    ]


def only_ties(found: Sequence[Mismatch]) -> bool:
    return all(mismatch.margin < TIE for mismatch in found)
