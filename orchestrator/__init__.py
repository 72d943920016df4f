"""Requests, rounds, clients and the command line. Never imports MLX; its own names are imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.client.async_client import AsyncClient
    from orchestrator.client.client import Client
    from orchestrator.client.cluster import LocalCluster
    from orchestrator.client.result import Chunk, GenerationResult
    from protocol.sampling import SamplingParams

_PUBLIC = {
    "AsyncClient": "orchestrator.client.async_client",
    "Chunk": "orchestrator.client.result",
    "Client": "orchestrator.client.client",
    "GenerationResult": "orchestrator.client.result",
    "LocalCluster": "orchestrator.client.cluster",
    "SamplingParams": "protocol.sampling",
}

__all__ = ["AsyncClient", "Chunk", "Client", "GenerationResult", "LocalCluster", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
