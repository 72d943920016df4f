"""Requests, rounds, clients and the command line. Never imports MLX; its own names are imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outrider.protocol.errors import (
    EndpointError,
    InvalidRequest,
    KeyFault,
    ModelError,
    OutriderError,
    ProtocolError,
    ServerBusy,
    ServerStopped,
    WorkerError,
)

if TYPE_CHECKING:
    from outrider.orchestrator.client.async_client import AsyncClient, AsyncResumed
    from outrider.orchestrator.client.client import Client, Resumed
    from outrider.orchestrator.client.cluster import LocalCluster
    from outrider.orchestrator.client.dialogue import Chunk, GenerationResult, TokenLogprob
    from outrider.protocol.sampling import Grammar, SamplingParams
    from outrider.protocol.schema import Origin

_LATER = {
    "AsyncClient": "outrider.orchestrator.client.async_client",
    "AsyncResumed": "outrider.orchestrator.client.async_client",
    "Chunk": "outrider.orchestrator.client.dialogue",
    "Client": "outrider.orchestrator.client.client",
    "GenerationResult": "outrider.orchestrator.client.dialogue",
    "Grammar": "outrider.protocol.sampling",
    "LocalCluster": "outrider.orchestrator.client.cluster",
    "Origin": "outrider.protocol.schema",
    "Resumed": "outrider.orchestrator.client.client",
    "SamplingParams": "outrider.protocol.sampling",
    "TokenLogprob": "outrider.orchestrator.client.dialogue",
}

__all__ = [
    "AsyncClient",
    "AsyncResumed",
    "Chunk",
    "Client",
    "EndpointError",
    "GenerationResult",
    "Grammar",
    "InvalidRequest",
    "KeyFault",
    "LocalCluster",
    "ModelError",
    "Origin",
    "OutriderError",
    "ProtocolError",
    "Resumed",
    "SamplingParams",
    "ServerBusy",
    "ServerStopped",
    "TokenLogprob",
    "WorkerError",
]

if not TYPE_CHECKING:  # a misspelt name is a type error, not Any

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LATER[name]), name)
