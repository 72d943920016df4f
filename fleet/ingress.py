"""The gate: the HTTP server of `outrider.server` in front of all engines of a fleet. It holds no model weights.

It runs uvicorn itself, because Ray Serve's proxy would delay each chunk (docs/fleet.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import reduce
from typing import Any

import uvicorn
from msgspec import structs
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outrider.fleet import plan
from outrider.fleet.engine import IngressKey
from outrider.fleet.leases import NO_ENGINE, EngineLeases, LeasedClient
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import EndpointError
from outrider.protocol.messages import Stats
from outrider.protocol.stats import by_name
from outrider.server.__main__ import DRAIN_SECONDS, config
from outrider.server.app import application
from outrider.server.model.served import load_served


async def total_stats(engines: Sequence[AsyncClient]) -> Stats:
    """Adds the statistics of the engines that answer.

    Raises:
        EndpointError: none answers.
    """
    answers = await asyncio.gather(*(engine.stats() for engine in engines), return_exceptions=True)
    found = []
    for number, stats in enumerate(answers):
        if isinstance(stats, Stats):  # worker names become unique across engines
            workers = tuple(structs.replace(one, name=f"{number}/{one.name}") for one in stats.workers)
            found.append(structs.replace(stats, workers=workers))
    if not found:
        raise EndpointError("no engine of the fleet answers; try again later")
    return reduce(_sum, found)


def _sum(left: Stats, right: Stats) -> Stats:
    """Adds all fields, except those that describe the answer itself."""
    names = set(Stats.__struct_fields__) - {"request", "version", "known", "endings"}
    sums: dict[str, Any] = {name: getattr(left, name) + getattr(right, name) for name in names}
    return structs.replace(left, endings=by_name(left.endings, right.endings), **sums)


SESSION = "x-session-id"


class FleetBackend:
    """Completes the gate's texts on leased engines."""

    def __init__(self, engines: EngineLeases, gate: plan.IngressPlan) -> None:
        self._engines = engines
        self._gate = gate

    def client(self, request: Request) -> LeasedClient:
        session = request.headers.get(SESSION, "") if self._gate.sessions else ""
        return LeasedClient(self._engines, session, self._gate.tries)

    async def stats(self) -> Stats:
        places = await self._engines.places()
        if not places:
            raise EndpointError(NO_ENGINE)
        return await total_stats([self._engines.client(place) for place in places])


class Ingress:
    """Serves HTTP in a thread of its own, from creation on."""

    _server: uvicorn.Server | None = None
    """None if the constructor failed."""

    def __init__(
        self, gate: plan.IngressPlan, engine: ServeSettings, handles: list[DeploymentHandle[Any]], many: list[int]
    ) -> None:
        files = find_model(engine.model or default_model()[0], weights=False)
        model = load_served(files.name, files.folder, gate.http.model_names, gate.http.tool_fallback)
        self._engines = EngineLeases(handles, many, engine.keys)
        app = application(model, FleetBackend(self._engines, gate), gate.http)
        self._listener = HttpListener(gate.http)
        self._server = server = uvicorn.Server(config(app, gate.http))
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True, name="http")
        self._thread.start()

    def url(self) -> str:
        """Returns the gate's URL."""
        return self._listener.url

    def ingress_key(self) -> IngressKey:
        """Returns the identity that engines see."""
        return self._engines.ingress_key

    def __call__(self, request: Request) -> Response:
        """Answers requests that come through Ray Serve's own proxy with the gate's URL."""
        return PlainTextResponse(f"This is Ray Serve's own proxy; the fleet's gate is at {self.url()}.\n", 421)

    def check_health(self) -> None:
        """Called by Serve. Raises EndpointError if the HTTP server has ended."""
        if not self._thread.is_alive():
            raise EndpointError("the gate's HTTP server has ended")

    def __del__(self) -> None:
        """Called by Ray Serve at the end. Responses that are nearly done may finish."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(DRAIN_SECONDS)

    def _serve(self, server: uvicorn.Server) -> None:
        self._engines.connect()
        server.run(sockets=[self._listener.socket])
