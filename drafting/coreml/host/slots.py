"""Which places of a cache are free. Knows numbers; knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class SlotMap:
    """`count` places, all free at first."""

    def __init__(self, count: int) -> None:
        self._free: NDArray[np.bool_] = np.ones(count, bool)

    @property
    def free(self) -> int:
        return int(self._free.sum())

    def take(self, count: int) -> list[int] | None:
        """The first `count` free places, taken; None when there are fewer."""
        found = np.flatnonzero(self._free)[:count]
        if len(found) < count:
            return None
        self._free[found] = False
        return [int(slot) for slot in found]

    def take_run(self, count: int, run: int) -> list[int] | None:
        """The first `count` of `run` free places in a row, taken; the rest stay free but get written. None: no run."""
        ends = np.convolve(self._free, np.ones(run, int), mode="valid")
        starts = np.flatnonzero(ends == run)
        if not starts.size:
            return None
        first = int(starts[0])
        self._free[first : first + count] = False
        return list(range(first, first + count))

    def give_back(self, slots: Iterable[int]) -> None:
        self._free[list(slots)] = True

    def clear(self) -> None:
        self._free[:] = True
