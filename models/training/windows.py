"""Which window of the token stream is seen when: a pure function of (seed, draw), so that a run can stop and go on."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import InvalidRequest


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def draw(count: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Indices [size] of draws `first` and on: every epoch of `count` draws is a permutation of its own."""
    draws = np.arange(first, first + size)
    return np.array([_epoch_order(count, seed, int(d // count))[d % count] for d in draws], dtype=np.int64)


def window_count(tokens: NDArray[np.uint16], length: int, *, spare: int) -> int:
    """Whole windows of `length` in the stream when `spare` tokens must follow the last. Raises when there is none."""
    count = (len(tokens) - spare) // length
    if count < 1:
        raise InvalidRequest(f"the text has {len(tokens)} tokens, expected at least {length + spare}; add text")
    return count


def rows(tokens: NDArray[np.uint16], starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Tokens [starts, length] of the stream, int64."""
    picked: NDArray[np.uint16] = tokens[starts[:, None] + np.arange(length)]
    return picked.astype(np.int64)


def training_rows(tokens: NDArray[np.uint16], length: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Rows [size, length + 1] for draws `first` and on, inputs and next tokens in one; each epoch cuts elsewhere."""
    count = window_count(tokens, length, spare=length)
    epochs = np.arange(first, first + size) // count
    shifts = np.array([_epoch_shift(length, seed, int(epoch)) for epoch in epochs], dtype=np.int64)
    return rows(tokens, draw(count, seed, first, size) * length + shifts, length + 1)


def _epoch_shift(length: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng((seed, epoch, length)).integers(length))
