"""Outrider: speculative speculative decoding on MLX. Names are imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.orchestrator.client.client import AsyncClient, AsyncResumed, Client, Resumed
    from outrider.orchestrator.client.cluster import LocalCluster
    from outrider.orchestrator.client.dialogue import Chunk, GenerationResult, TokenLogprob
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
    from outrider.protocol.sampling import Grammar, SamplingParams
    from outrider.protocol.schema import Origin

    __version__: str

__all__ = [
    "AsyncClient", "AsyncResumed", "Chunk", "Client", "EndpointError", "GenerationResult", "Grammar", "InvalidRequest",
    "KeyFault", "LocalCluster", "ModelError", "Origin", "OutriderError", "ProtocolError", "Resumed", "SamplingParams",
    "ServerBusy", "ServerStopped", "TokenLogprob", "WorkerError",
]  # fmt: skip
_MODULES = {
    "orchestrator.client.client": ("AsyncClient", "AsyncResumed", "Client", "Resumed"),
    "orchestrator.client.cluster": ("LocalCluster",),
    "orchestrator.client.dialogue": ("Chunk", "GenerationResult", "TokenLogprob"),
    "protocol.sampling": ("Grammar", "SamplingParams"),
    "protocol.schema": ("Origin",),
}
"""The modules of the names that are not errors."""

if not TYPE_CHECKING:  # a misspelt name is a type error, not Any

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("outrider.protocol.version").PACKAGE_VERSION
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = next((module for module, names in _MODULES.items() if name in names), "protocol.errors")
        return getattr(import_module(f"outrider.{module}"), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
