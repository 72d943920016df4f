"""Draws random windows of a token stream, each as a pure function of (seed, draw), so that a run can be interrupted."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import InvalidRequest


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def draw(count: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Returns the window indices [size] of the draws from `first` on; each epoch of `count` draws is a permutation."""
    draws = np.arange(first, first + size)
    return np.array([_epoch_order(count, seed, int(d // count))[d % count] for d in draws], dtype=np.int64)


def window_count(tokens: NDArray[np.uint16], length: int, *, spare: int) -> int:
    """Returns how many windows of `length` fit before the last `spare` tokens. Raises InvalidRequest if none fits."""
    count = (len(tokens) - spare) // length
    if count < 1:
        raise InvalidRequest(f"the text has {len(tokens)} tokens, expected at least {length + spare}; add text")
    return count


def gather(tokens: NDArray[np.uint16], starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the windows [starts, length] of the stream that begin at `starts`."""
    windows: NDArray[np.uint16] = tokens[starts[:, None] + np.arange(length)]
    return windows.astype(np.int64)


def training_batch(tokens: NDArray[np.uint16], length: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Returns windows [size, length + 1], inputs and next tokens in one, for the draws from `first` on. Each epoch cuts
    the stream at other positions."""
    count = window_count(tokens, length, spare=length)
    epochs = np.arange(first, first + size) // count
    shifts = np.array([_epoch_shift(length, seed, int(epoch)) for epoch in epochs], dtype=np.int64)
    return gather(tokens, draw(count, seed, first, size) * length + shifts, length + 1)


def _epoch_shift(length: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng((seed, epoch, length)).integers(length))
