"""Limits wired and cached memory on Metal, returns free memory to the system, and measures peak memory.

MLX-LM would wire three quarters of the machine's memory in each process. Two workers share it, so each wires what it
needs. The sum is not checked; `outrider doctor` shows how much can be wired.
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

_KV_BUDGET_BYTES = 2 * 2**30
_MARGIN_BYTES = 2**29
_CACHE_LIMIT_BYTES = 2**30
_MIN_RELEASE_BYTES = 2**15  # an array must be this large to be worth a system call
_TEXTS_PER_RELEASE = 32  # free memory is returned after this many ended texts


def release_memory() -> None:
    """Returns free memory to the system: MLX's cache, and glibc's free blocks between cached texts.

    Takes a millisecond or two.
    """
    mx.clear_cache()
    trim_memory()


def release_pages(array: np.ndarray[Any, Any]) -> None:
    """Returns the memory of a contiguous array to the system, unless it is small; its values are lost. Linux only.

    The array stays valid, and takes memory again where it is written. Pages that it shares with other data stay.
    """
    if sys.platform != "linux" or array.nbytes < _MIN_RELEASE_BYTES:
        return
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def wired_limit(weight_bytes: int, recommended: int, kv_bytes: int = _KV_BUDGET_BYTES) -> int:
    """Returns the bytes to wire for weights, KV caches and a margin: at most what the device recommends for all
    processes."""
    return min(weight_bytes + kv_bytes + _MARGIN_BYTES, recommended)


def set_limits(weight_bytes: int, kv_bytes: int = _KV_BUDGET_BYTES) -> None:
    """Sets this process's limits; does nothing without Metal."""
    if not mx.metal.is_available():
        return
    recommended = int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])  # only a GPU has it
    wired = wired_limit(weight_bytes, recommended, kv_bytes)
    mx.set_wired_limit(wired)
    mx.set_cache_limit(_CACHE_LIMIT_BYTES)
    log.info("wired limit %d MiB, cache limit %d MiB", wired >> 20, _CACHE_LIMIT_BYTES >> 20)


class PeakMemory:
    """The peak memory of this process, weights included.

    On a GPU: MLX's peak since `restart`. On a CPU: the process's peak since its start, since MLX does not count the
    memory of ONNX Runtime and numpy.
    """

    def __init__(self) -> None:
        self._ended_texts = 0

    def restart(self) -> None:
        mx.reset_peak_memory()

    def bytes(self) -> int:
        if mx.default_device().type == mx.cpu:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
        return mx.get_peak_memory()

    def count_ended_text(self) -> None:
        """Counts an ended text, and returns free memory from time to time."""
        self._ended_texts += 1
        if self._ended_texts % _TEXTS_PER_RELEASE == 0:
            release_memory()
