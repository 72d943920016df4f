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
    from outrider.orchestrator.client.async_client import AsyncClient
    from outrider.orchestrator.client.client import Client
    from outrider.orchestrator.client.cluster import LocalCluster
    from outrider.orchestrator.client.result import Chunk, GenerationResult, TokenLogprob
    from outrider.orchestrator.client.resumed import AsyncResumed, Resumed
    from outrider.protocol.grammar import Grammar
    from outrider.protocol.origins import Origin
    from outrider.protocol.sampling import SamplingParams

_LATER = {
    "AsyncClient": "outrider.orchestrator.client.async_client",
    "AsyncResumed": "outrider.orchestrator.client.resumed",
    "Chunk": "outrider.orchestrator.client.result",
    "Client": "outrider.orchestrator.client.client",
    "GenerationResult": "outrider.orchestrator.client.result",
    "Grammar": "outrider.protocol.grammar",
    "LocalCluster": "outrider.orchestrator.client.cluster",
    "Origin": "outrider.protocol.origins",
    "Resumed": "outrider.orchestrator.client.resumed",
    "SamplingParams": "outrider.protocol.sampling",
    "TokenLogprob": "outrider.orchestrator.client.result",
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
