"""Who asks: the orchestrator lets its clients take turns, so whoever has a key, or an address, of its own is one.

Knows a request's headers and where it came from; the keys themselves are checked at the door.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Protocol

from starlette.requests import Request

from outrider.orchestrator.client.async_asker import AsyncAsker
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.protocol.messages import Stats
from outrider.server.door import key_of

MOST = 1024
PATIENCE_SECONDS = 10.0


def caller_of(request: Request) -> str:
    """Whoever sent `request`: their key, or their address."""
    return key_of(request.scope) or (request.client.host if request.client is not None else "")


def pseudonym(caller: str) -> str:
    """The same caller under a name that tells no key, for an orchestrator that may be another machine's."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16]


class Answering(Protocol):
    """Whoever completes texts for this server."""

    def asker(self, request: Request) -> AsyncAsker:
        """The one to ask for whoever sent `request`."""

    async def stats(self) -> Stats:
        """What it does now. Raises OutriderError when it does not answer."""


class Callers:
    """A client of the orchestrator for each caller, those that asked last."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._clients: OrderedDict[str, AsyncClient] = OrderedDict()
        self._own = AsyncClient(endpoint, PATIENCE_SECONDS)

    def asker(self, request: Request) -> AsyncClient:
        caller = caller_of(request)
        if caller not in self._clients:
            self._clients[caller] = AsyncClient(self._endpoint, PATIENCE_SECONDS)
            if len(self._clients) > MOST:
                self._clients.popitem(last=False)
        self._clients.move_to_end(caller)
        return self._clients[caller]

    async def stats(self) -> Stats:
        return await self._own.stats()
