"""The ingress: the HTTP server of `outrider.server` in front of all engines of a fleet. It holds no model weights.

It runs uvicorn itself, because Ray Serve's proxy would delay each chunk (docs/fleet.md). For each text it leases an
engine, and continues with another when that is lost. Ray Serve chooses the engine and reports its end; requests and
tokens pass by ZeroMQ.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import ray
import uvicorn
from msgspec import structs
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outrider.fleet import plan
from outrider.fleet.engine import ActorKeyring, EngineAddress, IngressKey
from outrider.fleet.engine_selector import EngineSelector
from outrider.orchestrator.client.async_client import AsyncBaseClient, AsyncClient, ChunkHandler
from outrider.orchestrator.client.dialogue import Dialogue
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import EndpointError, KeyFault, ServerStopped
from outrider.protocol.messages import Stats
from outrider.protocol.stats import add_counts
from outrider.server.__main__ import DRAIN_SECONDS, uvicorn_config
from outrider.server.app import build_app
from outrider.server.model.served import load_served_model
from outrider.server.server_context import run_unless

LEASE_TIMEOUT_SECONDS = 2.0
"""Timeout of a lease."""
ENGINE_TIMEOUT_SECONDS = 2.0
"""Timeout for an answer from an engine that Ray considers alive."""
MAX_CLIENTS = 1024
SESSION_HEADER = "x-session-id"
NO_ENGINE_MESSAGE = "no engine of the fleet answers; try again later (`outrider fleet status` shows why)"


class EngineLeases:
    """Completes the ingress's texts on engines. Each kind is a Ray Serve deployment of about `engine_counts` engines.

    `keys`: the folder of keys for attached engines.
    """

    def __init__(
        self,
        ingress: plan.IngressPlan,
        kinds: Sequence[DeploymentHandle[Any]],
        engine_counts: Sequence[int],
        keys: Path | None,
    ) -> None:
        self._ingress = ingress
        self._kinds = kinds
        self._keys = keys
        self._keyring = ActorKeyring()
        here = ray.get_runtime_context()
        self._ingress_key = IngressKey(self._keyring.key, here.get_actor_name() or "")
        self._host = here.get_node_id()
        self._client_for = lru_cache(MAX_CLIENTS)(self._connect_to)
        self._selector = EngineSelector(engine_counts)

    def client(self, request: Request) -> LeasedClient:
        session = request.headers.get(SESSION_HEADER, "") if self._ingress.sessions else ""
        return LeasedClient(self, session, self._ingress.tries)

    async def stats(self) -> Stats:
        """Returns the sum of the statistics of the engines that answer. Raises EndpointError if none does."""
        reports = await asyncio.gather(*(asyncio.to_thread(self._reports, kind) for kind in self._kinds))
        found = []
        for number, stats in enumerate(chain.from_iterable(reports)):  # worker names become unique across engines
            workers = tuple(structs.replace(one, name=f"{number}/{one.name}") for one in stats.workers)
            found.append(structs.replace(stats, workers=workers))
        if not found:
            raise EndpointError(NO_ENGINE_MESSAGE)
        return reduce(_add_stats, found)

    def _reports(self, kind: DeploymentHandle[Any]) -> list[Stats]:
        """Returns the answering engines' statistics. It blocks: `results_async` has none if one engine hangs."""
        with suppress(RayError, RayServeException, TimeoutError):
            replies = kind.broadcast("report").results(timeout_s=LEASE_TIMEOUT_SECONDS, return_exceptions=True)
            return [reply[1] for reply in replies if not isinstance(reply, Exception)]
        return []

    async def complete(self, session: str, ask: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
        """Leases the engine that Serve chooses, the same for a `session` where possible, and awaits `ask` with its
        client.

        Raises:
            EndpointError: no engine answers, or the engine refuses this ingress.
            ServerStopped: the engine ends before `ask` does.
        """
        kind = self._selector.choose(session)
        response = self._kinds[kind].options(stream=True, session_id=session).lease.remote(self._ingress_key)
        place: EngineAddress | None = None
        try:
            with self._selector.under_way(kind):
                place = await self._first_address(response, kind)
                stopped = ServerStopped("the engine stopped during this request; send it again")
                await run_unless(_wait_until_gone(response), stopped, ask(self._client_for(place)))
        except (EndpointError, ServerStopped, KeyFault) as error:
            if place is not None:
                self._selector.mark_lost(kind, place)
            if isinstance(error, KeyFault):
                raise EndpointError(f"the engine refuses this ingress: {error}") from None
            raise
        finally:
            response.cancel()

    def connect(self) -> None:
        """Makes Serve resolve the engines now, so that the first request need not wait for it."""
        for kind in self._kinds:
            self._reports(kind)

    def _connect_to(self, place: EngineAddress) -> AsyncClient:
        where = EngineAddress(place.own) if place.own and place.host == self._host else place
        keys = self._keyring.folder if where.key else self._keys
        return AsyncClient(where.endpoint, ENGINE_TIMEOUT_SECONDS, server_key=where.key or None, keys=keys)

    async def _first_address(self, response: Any, kind: int) -> EngineAddress:
        try:
            async with asyncio.timeout(LEASE_TIMEOUT_SECONDS):
                place: EngineAddress = await anext(response)
                return place
        except (TimeoutError, RayError, RayServeException) as error:
            if isinstance(error, TimeoutError):
                self._selector.mark_silent(kind)
            raise EndpointError(NO_ENGINE_MESSAGE) from None


class LeasedClient(AsyncBaseClient):
    """Completes texts on leased engines. `sources`: the number of engines tried until a text has begun.

    After the first try the engine is chosen randomly, because the session or load would select the failing one again.
    """

    def __init__(self, engines: EngineLeases, session: str, sources: int) -> None:
        super().__init__()
        self.sources = sources
        self._engines = engines
        self._session = session
        self._tried = Counter[str]()

    async def run_once(self, dialogue: Dialogue, on_chunk: ChunkHandler) -> None:
        tried = self._tried[dialogue.request]
        self._tried[dialogue.request] += 1
        session = f"{self._session} {dialogue.request} {tried}" if tried else self._session
        await self._engines.complete(session, lambda client: client.run_once(dialogue, on_chunk))


async def _wait_until_gone(response: Any) -> None:
    with suppress(RayError, RayServeException):
        async for _ in response:
            pass


def _add_stats(left: Stats, right: Stats) -> Stats:
    """Adds all fields, except those that describe the answer itself."""
    names = set(Stats.__struct_fields__) - {"request", "version", "known", "endings"}
    sums: dict[str, Any] = {name: getattr(left, name) + getattr(right, name) for name in names}
    return structs.replace(left, endings=add_counts(left.endings, right.endings), **sums)


class Ingress:
    """Serves HTTP in a thread of its own, from creation on."""

    _server: uvicorn.Server | None = None
    """None if the constructor failed."""

    def __init__(
        self,
        ingress: plan.IngressPlan,
        engine: ServeSettings,
        handles: list[DeploymentHandle[Any]],
        engine_counts: list[int],
    ) -> None:
        keep = engine.gguf_keep_precision
        files = find_model(engine.model or default_model(keep)[0], weights=False, keep_precision=keep)
        model = load_served_model(files.name, files.folder, ingress.model_names, ingress.tool_fallback)
        self._engines = EngineLeases(ingress, handles, engine_counts, engine.keys)
        app = build_app(model, self._engines, ingress)
        self._listener = HttpListener(ingress)
        self._server = server = uvicorn.Server(uvicorn_config(app, ingress))
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True, name="http")
        self._thread.start()

    def url(self) -> str:
        """Returns the ingress's URL."""
        return self._listener.url

    def __call__(self, request: Request) -> Response:
        """Answers requests that come through Ray Serve's own proxy with the ingress's URL."""
        return PlainTextResponse(f"This is Ray Serve's own proxy; the fleet's ingress is at {self.url()}.\n", 421)

    def check_health(self) -> None:
        """Called by Serve. Raises EndpointError if the HTTP server has ended."""
        if not self._thread.is_alive():
            raise EndpointError("the ingress's HTTP server has ended")

    def __del__(self) -> None:
        """Called by Ray Serve at the end. Responses that are nearly done may finish."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(DRAIN_SECONDS)

    def _serve(self, server: uvicorn.Server) -> None:
        self._engines.connect()
        server.run(sockets=[self._listener.socket])
