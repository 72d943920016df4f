"""A sampler's log-probabilities, after penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from outrider.engine.sampling import History, Sampler
from outrider.protocol.sampling import SamplingParams


def filtered_logprobs(logits: mx.array, histories: Sequence[History] | None, params: SamplingParams) -> mx.array:
    """Returns the log-probabilities [R, V] of logits [R, V]: a sampler's scores without the Gumbel noise."""
    sampler = Sampler(replace(params, seed=params.seed or 0), logits.shape[-1])
    return sampler.filtered(sampler.penalise(logits, histories))
