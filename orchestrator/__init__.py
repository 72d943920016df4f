"""Requests, rounds, clients and the command line. Never imports MLX; its own names are imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.async_client import AsyncClient
    from orchestrator.client import Client
    from orchestrator.cluster import LocalCluster
    from orchestrator.result import Chunk, GenerationResult
    from protocol.sampling import SamplingParams

_PUBLIC = {
    "AsyncClient": "orchestrator.async_client",
    "Chunk": "orchestrator.result",
    "Client": "orchestrator.client",
    "GenerationResult": "orchestrator.result",
    "LocalCluster": "orchestrator.cluster",
    "SamplingParams": "protocol.sampling",
}

__all__ = ["AsyncClient", "Chunk", "Client", "GenerationResult", "LocalCluster", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
