"""Limits of wired and cached memory on Metal, and the return of free memory.

MLX-LM would wire three quarters of the machine in each process. Since two workers share it, each wires what it needs.
The sum is not checked; `outrider doctor` shows how much can be wired.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
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
