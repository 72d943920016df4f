"""Outrider: speculative speculative decoding. The public names are imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # a misspelt name is a type error, not Any
    from outrider.orchestrator.client.async_client import AsyncClient as AsyncClient
    from outrider.orchestrator.client.async_client import AsyncResumed as AsyncResumed
    from outrider.orchestrator.client.async_client import AsyncStream as AsyncStream
    from outrider.orchestrator.client.client import Client as Client
    from outrider.orchestrator.client.client import Resumed as Resumed
    from outrider.orchestrator.client.client import Stream as Stream
    from outrider.orchestrator.client.cluster import LocalCluster as LocalCluster
    from outrider.orchestrator.client.dialogue import Chunk as Chunk
    from outrider.orchestrator.client.dialogue import GenerationResult as GenerationResult
    from outrider.orchestrator.client.dialogue import TokenLogprob as TokenLogprob
    from outrider.protocol.errors import EndpointError as EndpointError
    from outrider.protocol.errors import InvalidRequest as InvalidRequest
    from outrider.protocol.errors import KeyFault as KeyFault
    from outrider.protocol.errors import ModelError as ModelError
    from outrider.protocol.errors import OutriderError as OutriderError
    from outrider.protocol.errors import ProtocolError as ProtocolError
    from outrider.protocol.errors import ServerBusy as ServerBusy
    from outrider.protocol.errors import ServerStopped as ServerStopped
    from outrider.protocol.errors import WorkerError as WorkerError
    from outrider.protocol.messages import Stats as Stats
    from outrider.protocol.messages import Timings as Timings
    from outrider.protocol.sampling import Grammar as Grammar
    from outrider.protocol.sampling import SamplingParams as SamplingParams
    from outrider.protocol.schema import Origin as Origin
else:
    _MODULES = {
        "orchestrator.client.async_client": "AsyncClient AsyncResumed AsyncStream",
        "orchestrator.client.client": "Client Resumed Stream",
        "orchestrator.client.cluster": "LocalCluster",
        "orchestrator.client.dialogue": "Chunk GenerationResult TokenLogprob",
        "protocol.errors": "EndpointError InvalidRequest KeyFault ModelError OutriderError"
        " ProtocolError ServerBusy ServerStopped WorkerError",
        "protocol.messages": "Stats Timings",
        "protocol.sampling": "Grammar SamplingParams",
        "protocol.schema": "Origin",
    }
    _LATER = {name: f"outrider.{module}" for module, names in _MODULES.items() for name in names.split()}
    __all__ = sorted(_LATER)

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LATER[name]), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
