"""The filters of `engine.sampling.warp` in numpy, for reading a drafter's scores on a CPU.

MLX sorts a whole vocabulary for top-p: 4 ms for 12 rows of 4,096 there, 0.2 ms here. The same tokens are kept, up to
rounding at a border; a drafter may differ there, for only the target's choice counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.protocol.sampling import SamplingParams

Floats = np.ndarray[Any, np.dtype[np.float32]]


def apply(logits: Floats, params: SamplingParams) -> Floats:
    """Logits [R, V], penalised but not normalised, at temperature above 0: filtered ones -inf, then divided by it."""
    top = logits.max(axis=-1)
    lowest = np.full(len(logits), -np.inf, dtype=np.float32)
    if 0 < params.top_p < 1:
        lowest = _top_p(logits, top, params.top_p)
    if params.min_p > 0:
        lowest = np.maximum(lowest, top + math.log(params.min_p))
    if 0 < params.top_k < logits.shape[1]:
        lowest = np.maximum(lowest, np.partition(logits, -params.top_k, axis=-1)[:, -params.top_k])
    kept: Floats = np.where(logits < lowest[:, None], -np.inf, logits * np.float32(1.0 / params.temp))
    return kept


def _top_p(logits: Floats, top: Floats, p: float) -> Floats:
    """The lowest logit of each row's nucleus: the fewest best tokens whose mass reaches `p`."""
    mass = np.exp(logits - top[:, None])
    total = mass.sum(axis=-1)
    # All tokens below this together weigh less than 1 - p: they can't belong to it.
    hopeless = (1.0 - p) * total / logits.shape[1]
    lowest = np.empty_like(top)
    for row in range(len(logits)):
        large = mass[row][mass[row] >= hopeless[row]]
        order = np.sort(large)[::-1]
        above = np.cumsum(order) - order
        last = int(np.searchsorted(above, p * total[row], side="left")) - 1
        lowest[row] = logits[row][mass[row] >= order[last]].min()
    return lowest
