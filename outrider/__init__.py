"""Outrider: speculative speculative decoding on MLX. A thin facade over `orchestrator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orchestrator

if TYPE_CHECKING:
    from orchestrator import AsyncClient, Chunk, Client, GenerationResult, LocalCluster, SamplingParams

__all__ = ["AsyncClient", "Chunk", "Client", "GenerationResult", "LocalCluster", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from protocol.version import PACKAGE_VERSION

        return PACKAGE_VERSION
    return getattr(orchestrator, name)
