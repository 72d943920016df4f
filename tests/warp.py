"""A sampler's log-probabilities, without a sampler at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from outrider.engine.sampling import History, Sampler
from outrider.protocol.sampling import SamplingParams


def warp(logits: mx.array, histories: Sequence[History] | None, params: SamplingParams) -> mx.array:
    """Returns the scores of logits [R, V] without noise."""
    sampler = Sampler(replace(params, seed=params.seed or 0), logits.shape[-1])
    return sampler.filtered(sampler.penalise(logits, histories))
