"""Limits of wired and cached memory on Metal, the return of free memory, and the most memory held (`PeakMemory`).

MLX-LM would wire three quarters of the machine in each process. Since two workers share it, each wires what it needs.
The sum is not checked; `outrider doctor` shows how much can be wired.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import sys
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.protocol.process import trim_memory

log = logging.getLogger(__name__)

_KV_BUDGET = 2 * 2**30
_MARGIN = 2**29
_CACHE = 2**30


def give_back() -> None:
    """Returns free memory to the system: MLX's cache, and glibc's free blocks between cached texts.

    Takes a millisecond or two.
    """
    mx.clear_cache()
    trim_memory()


def release_pages(array: np.ndarray[Any, Any]) -> None:
    """Returns the memory of a contiguous array, whose values are lost, to the system. Linux only.

    The array stays valid, and takes memory again where it is written. Pages that it shares with other data stay.
    """
    if sys.platform != "linux":
        return
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def wired_limit(weight_bytes: int, recommended: int, kv_bytes: int = _KV_BUDGET) -> int:
    """Returns the bytes to wire for weights, KV caches and a margin: at most what the device recommends for all
    processes."""
    return min(weight_bytes + kv_bytes + _MARGIN, recommended)


def set_limits(weight_bytes: int, kv_bytes: int = _KV_BUDGET) -> None:
    """Sets this process's limits; does nothing without Metal."""
    if not mx.metal.is_available():
        return
    wired = wired_limit(weight_bytes, int(mx.device_info()["max_recommended_working_set_size"]), kv_bytes)
    mx.set_wired_limit(wired)
    mx.set_cache_limit(_CACHE)
    log.info("wired limit %d MiB, cache limit %d MiB", wired >> 20, _CACHE >> 20)


# Free memory is returned after so many ended texts if none runs, and after so many in any case.
_WHERE_IDLE, _AT_THE_LATEST = 16, 64


class PeakMemory:
    """The most memory that this process has held, weights included.

    On a GPU: MLX's peak since `restart`. On a CPU: the process's peak since its start, since MLX does not count the
    memory of ONNX Runtime and numpy.
    """

    def __init__(self) -> None:
        self._ended = 0

    def restart(self) -> None:
        mx.reset_peak_memory()

    def bytes(self) -> int:
        if mx.default_device().type == mx.cpu:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
        return mx.get_peak_memory()

    def ended(self, idle: bool) -> None:
        """Counts an ended text; `idle`: no text runs now."""
        self._ended += 1
        if self._ended >= (_WHERE_IDLE if idle else _AT_THE_LATEST):
            self._ended = 0
            give_back()
