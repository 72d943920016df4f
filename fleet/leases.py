"""Leases of engines: a gate leases one for each text, and continues with another when it is lost.

Ray Serve chooses the engine and reports its end. Requests and tokens pass by ZeroMQ.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.fleet.engine import ActorKeyring, EngineAddress, ingress_key
from outrider.fleet.engine_selector import EngineSelector
from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient, Grown
from outrider.orchestrator.client.client import MOVES_ON
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.protocol.errors import EndpointError, ServerStopped

WAIT_SECONDS = 2.0
"""Timeout of a lease."""
SILENT_SECONDS = 2.0
"""Timeout of an engine that Ray considers alive."""
MOST_KNOWN = 1024
NO_ENGINE = "no engine of the fleet answers; try again later (`outrider fleet status` shows why)"


@dataclass(frozen=True, slots=True)
class Lease:
    """A leased engine, until `gone`."""

    client: AsyncClient
    gone: asyncio.Future[None]

    async def during(self, asking: Coroutine[Any, Any, None]) -> None:
        """Awaits `asking`. Raises ServerStopped if the engine ends first."""
        task = asyncio.ensure_future(asking)
        try:
            await asyncio.wait((task, self.gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServerStopped("the engine stopped during this request; send it again")
            task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))


class EngineLeases:
    """Leases engines of all kinds, each a deployment of Ray Serve with about `many` engines.

    `keys`: the folder of keys for attached engines.
    """

    def __init__(self, kinds: Sequence[DeploymentHandle[Any]], many: Sequence[int], keys: Path | None) -> None:
        self._kinds = kinds
        self._keys = keys
        self._keyring = ActorKeyring()
        self.ingress_key = ingress_key(self._keyring.key)
        self._host = ray.get_runtime_context().get_node_id()
        self._clients: dict[EngineAddress, AsyncClient] = {}
        self._turns = EngineSelector(many)

    @asynccontextmanager
    async def lease(self, session: str) -> AsyncIterator[Lease]:
        """Leases the engine that Serve chooses, the same for a `session` where possible.

        Raises:
            EndpointError: there is none.
        """
        kind = self._turns.choose(session)
        response = self._kinds[kind].options(stream=True, session_id=session).lease.remote(self.ingress_key)
        gone: asyncio.Task[None] | None = None
        try:
            with self._turns.under_way(kind):
                place = await self._first_address(response, kind)
                gone = asyncio.create_task(_until_gone(response))
                yield Lease(self.client(place), gone)
        except (EndpointError, ServerStopped):
            if gone is not None:
                self._turns.lost(kind, place)
            raise
        finally:
            response.cancel()
            if gone is not None:
                gone.cancel()

    def connect(self) -> None:
        """Has Serve resolve the engines, which the first request would wait for otherwise."""
        for kind in self._kinds:
            with suppress(RayError, RayServeException, TimeoutError):
                kind.broadcast("place", self.ingress_key).results(timeout_s=WAIT_SECONDS)

    async def places(self) -> list[EngineAddress]:
        """Returns the addresses of all engines that answer."""
        found: list[EngineAddress] = []
        for kind in self._kinds:
            with suppress(RayError, RayServeException, TimeoutError):
                found += await kind.broadcast("place", self.ingress_key).results_async(timeout_s=WAIT_SECONDS)
        return found

    def client(self, place: EngineAddress) -> AsyncClient:
        """Returns a client of an engine."""
        if place not in self._clients:
            if len(self._clients) >= MOST_KNOWN:
                self._clients.clear()
            where = EngineAddress(place.own) if place.own and place.host == self._host else place
            keys = self._keyring.folder if where.key else self._keys
            self._clients[place] = AsyncClient(where.endpoint, SILENT_SECONDS, server_key=where.key or None, keys=keys)
        return self._clients[place]

    async def _first_address(self, response: Any, kind: int) -> EngineAddress:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                place: EngineAddress = await anext(response)
                return place
        except TimeoutError:
            self._turns.silent(kind)
            raise EndpointError(NO_ENGINE) from None
        except (RayError, RayServeException):
            raise EndpointError(NO_ENGINE) from None


class LeasedClient(AsyncBaseClient):
    """Completes texts on leased engines. `sources`: the number of engines tried until a text has begun.

    After the first try the engine is chosen randomly, because the session or load would select the failing one again.
    """

    moves_on = MOVES_ON

    def __init__(self, engines: EngineLeases, session: str, sources: int) -> None:
        super().__init__()
        self.sources = sources
        self._engines = engines
        self._session = session
        self._asked: dict[str, AsyncClient] = {}
        self._tried = Counter[str]()

    async def once(self, dialogue: Dialogue, grown: Grown) -> None:
        tried = self._tried[dialogue.request]
        self._tried[dialogue.request] += 1
        session = f"{self._session} {dialogue.request} {tried}" if tried else self._session
        async with self._engines.lease(session) as lease:
            self._asked[dialogue.request] = lease.client
            await lease.during(lease.client.once(dialogue, grown))

    async def end(self, dialogue: Dialogue) -> None:
        if dialogue.request in self._asked:
            await self._asked[dialogue.request].end(dialogue)


async def _until_gone(response: Any) -> None:
    with suppress(RayError, RayServeException):
        async for _ in response:
            pass
