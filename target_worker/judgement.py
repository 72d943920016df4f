"""Is a token that the target would not have chosen one that rounding explains?

Two correct forwards may differ: chunk and step kernels round differently, each in the model's own format. So a token is
a tie when some logits within the tolerance would have made it the choice, filters and temperature included. Knows the
logits of one position; knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling import Sampler
from outrider.protocol.certificate import Difference
from outrider.protocol.sampling import SamplingParams

# What the difference of two logits may be off by: at least this, and a step of the format for each of the two.
LEAST = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1.5e-1}
SCORE_ROUNDING = 1e-5  # scores are float32, with noise of size 16 in them, and count T times in logits
SUM_ROUNDING = 1e-5  # of the probabilities that top-p adds up


def judge(logits: mx.array, tokens: Sequence[int], sampler: Sampler, token: int) -> Difference | None:
    """None when `token` is what `sampler` chooses behind `tokens` by `logits` [1, V]."""
    history = [tokens] if sampler.needs_history else None
    expected = _whole(mx.argmax(sampler.scores(logits, [len(tokens)], history)[0]))
    if expected == token:
        return None
    params = sampler.params
    stretched = max(params.repetition_penalty, 1 / params.repetition_penalty)  # what a penalty may make of a difference
    tolerance = stretched * _tolerance(logits, token, expected) + SCORE_ROUNDING * params.temp
    reach = stretched * _tolerance(logits, token, expected, _whole(mx.argmax(logits[0])))
    warped = np.array(sampler.penalise(logits.astype(mx.float32), history))[0]
    noise = np.array(sampler.noise([len(tokens)]))[0] if sampler.noisy else np.zeros_like(warped)
    worth = warped + params.temp * noise
    # The least it has to beat: the best of what no rounding rules out, wherever rounding would put the borders.
    surely = warped > max((floor for _, floor in _borders(warped, params, reach)), default=-math.inf)
    surely[np.argmax(warped)] = True
    possible = warped[token] >= max((floor for floor, _ in _borders(warped, params, reach)), default=-math.inf)
    margin = max(0.0, float(worth[surely].max() - worth[token])) if possible else math.inf
    return Difference(len(tokens), token, expected, margin if math.isfinite(margin) else None, tolerance)


def is_tie(difference: Difference) -> bool:
    return difference.margin is not None and difference.margin <= difference.tolerance


def _tolerance(logits: mx.array, *tokens: int) -> float:
    """By how much rounding may change the difference between any two of these."""
    largest = max(abs(_number(logits[0, token])) for token in tokens)
    step = float(mx.finfo(logits.dtype).eps) * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    return max(LEAST.get(logits.dtype, LEAST[mx.float32]), 2 * step)


def _borders(warped: NDArray[np.float32], params: SamplingParams, reach: float) -> Iterator[tuple[float, float]]:
    """For each filter: below the first no logit can pass, above the second all do, when they may differ by `reach`."""
    if params.temp == 0:
        return
    falling = -np.sort(-warped)
    if 0 < params.top_p < 1:
        shares = np.exp(falling - falling[0], dtype=np.float64)
        above = (np.cumsum(shares) - shares) / shares.sum()  # a token passes while those above it are less than top-p
        odds = math.log(params.top_p / (1 - params.top_p))
        most, least = (1 / (1 + math.exp(-odds - by)) + math.copysign(SUM_ROUNDING, by) for by in (reach, -reach))
        yield falling[max(np.sum(above < most), 1) - 1] - reach, _behind(falling, int(np.sum(above < least))) + reach
    if params.min_p > 0:
        border = falling[0] + math.log(params.min_p)
        yield border - reach, border + reach
    if 0 < params.top_k < len(falling):
        yield falling[params.top_k - 1] - reach, falling[params.top_k] + reach


def _behind(falling: NDArray[np.float32], kept: int) -> float:
    """The first logit that is left out when `kept` are not."""
    return float(falling[kept]) if kept < len(falling) else -math.inf


def _number(scalar: mx.array) -> float:
    value: Any = scalar.item()
    return float(value)


def _whole(scalar: mx.array) -> int:
    return int(_number(scalar))
