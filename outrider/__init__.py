"""Outrider: speculative speculative decoding on MLX. A thin facade over `outrider.orchestrator`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.orchestrator import AsyncClient, Chunk, Client, GenerationResult, LocalCluster, SamplingParams

__all__ = ["AsyncClient", "Chunk", "Client", "GenerationResult", "LocalCluster", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from outrider.protocol.version import PACKAGE_VERSION

        return PACKAGE_VERSION
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("outrider.orchestrator"), name)
