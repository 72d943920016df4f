"""How much memory this process may wire and keep cached on Metal, how much it has held, and when it is given back.

MLX-LM would wire three quarters of the machine in each process. Two workers share it, so each asks for what it needs.
The sum is not checked; `outrider doctor` shows what may be wired.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

log = logging.getLogger(__name__)

_KV_BUDGET = 2 * 2**30
_MARGIN = 2**29
_CACHE = 2**30
# Free memory is given back after so many texts have ended and none runs, and after so many in any case.
_WHERE_IDLE, _AT_THE_LATEST = 16, 64


def give_back() -> None:
    """Returns free memory to the system: MLX's cache, and glibc's holes between texts that were remembered.

    It takes a millisecond or two.
    """
    mx.clear_cache()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeakMemory:
    """The most memory that this process has held, weights included.

    On a GPU: what MLX has held since `restart`. On a CPU: the process's own peak since it started, for ONNX Runtime and
    numpy hold what MLX knows nothing of.
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
        """A text has ended; `idle`: none runs now."""
        self._ended += 1
        if self._ended >= (_WHERE_IDLE if idle else _AT_THE_LATEST):
            self._ended = 0
            give_back()


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes."""

    wired: int
    cache: int


def plan_limits(weight_bytes: int, recommended: int, kv_bytes: int = _KV_BUDGET) -> MemoryLimits:
    """Weights, room for KV caches and a margin, never past what the device recommends for all processes together."""
    return MemoryLimits(min(weight_bytes + kv_bytes + _MARGIN, recommended), _CACHE)


def set_limits(weight_bytes: int, kv_bytes: int = _KV_BUDGET) -> MemoryLimits | None:
    """Sets this process's limits; None where there is no Metal."""
    if not mx.metal.is_available():
        return None
    limits = plan_limits(weight_bytes, int(mx.device_info()["max_recommended_working_set_size"]), kv_bytes)
    mx.set_wired_limit(limits.wired)
    mx.set_cache_limit(limits.cache)
    log.info("wired limit %d MiB, cache limit %d MiB", limits.wired >> 20, limits.cache >> 20)
    return limits
