"""How dense weights lie in memory on a CPU: transposed where the BLAS in this process multiplies faster that way.

Measured (docs/log.md): OpenBLAS gains a quarter on weights that fit the last-level cache and loses a twentieth on
larger ones; the reference BLAS gains a third on all, and gives the same bits. Values never change, only strides.
"""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx
import mlx.nn as nn

_CACHE_BYTES = 24 * 2**20


class HeadEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding that is also the output head: rows are looked up in one layout and multiplied in the other."""

    def __init__(self, weight: mx.array) -> None:
        nn.Module.__init__(self)
        self.weight = weight
        self._head = mx.contiguous(weight.T)

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ self._head


def lay_out(model: nn.Module, weight_bytes: int) -> bool:
    """Transposes the weights of all dense linear layers in memory if that pays here; tells whether it did."""
    if mx.default_device().type != mx.cpu or sys.platform != "linux":
        return False
    if _has_openblas() and weight_bytes > _CACHE_BYTES:
        return False
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = mx.contiguous(module.weight.T).T
        for name, child in module.children().items():
            if tied and type(child) is nn.Embedding and name == "embed_tokens":
                module[name] = HeadEmbedding(child.weight)
    return True


def _has_openblas() -> bool:
    """True when an OpenBLAS was preloaded: its symbols then stand before the wheel's own BLAS."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")
