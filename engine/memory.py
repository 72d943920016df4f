"""How much memory this process may wire and keep cached. Only Metal has such limits; elsewhere this does nothing.

MLX-LM would wire three quarters of the machine in each process; two workers must share it, so each asks for what it
needs. Nobody checks the sum; `outrider doctor` shows what may be wired. And how much it did hold, anywhere.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx

log = logging.getLogger(__name__)

_KV_BUDGET = 2 * 2**30
_MARGIN = 2**29
_CACHE = 2**30


class Peak:
    """The most bytes that MLX has held in this process since `restart`, weights included."""

    def restart(self) -> None:
        mx.reset_peak_memory()

    def bytes(self) -> int:
        return mx.get_peak_memory()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes."""

    wired: int
    cache: int


def plan_limits(weight_bytes: int, recommended: int, kv_bytes: int = _KV_BUDGET) -> Limits:
    """Weights, room for KV caches and a margin, never past what the device recommends for all processes together."""
    return Limits(min(weight_bytes + kv_bytes + _MARGIN, recommended), _CACHE)


def set_limits(weight_bytes: int, kv_bytes: int = _KV_BUDGET) -> Limits | None:
    """Sets this process's limits; None where there is no Metal."""
    if not mx.metal.is_available():
        return None
    limits = plan_limits(weight_bytes, int(mx.device_info()["max_recommended_working_set_size"]), kv_bytes)
    mx.set_wired_limit(limits.wired)
    mx.set_cache_limit(limits.cache)
    log.info("wired limit %d MiB, cache limit %d MiB", limits.wired >> 20, limits.cache >> 20)
    return limits
