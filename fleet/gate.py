"""The gate: the HTTP of `outrider.server` as it is, before all engines of a fleet. Holds no model and no text.

uvicorn runs here, not Ray Serve's proxy, through which each chunk would come later (docs/fleet.md).
"""

from __future__ import annotations

import threading
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outrider.fleet import plan
from outrider.fleet.leases import NOBODY, Engines, Kind, Leased
from outrider.fleet.place import Visitor
from outrider.fleet.totals import together
from outrider.orchestrator.machine.http_process import Listener
from outrider.orchestrator.pair.model_files import default_model, find_model
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import EndpointError
from outrider.protocol.messages import Stats
from outrider.server.__main__ import DRAIN_SECONDS, config
from outrider.server.app import application
from outrider.server.model.served import load_served
from outrider.server.serving import Server

SESSION = "x-session-id"


class Behind:
    """What stands behind the gate's HTTP."""

    def __init__(self, engines: Engines, gate: plan.Gate) -> None:
        self._engines = engines
        self._gate = gate

    def asker(self, request: Request) -> Leased:
        session = request.headers.get(SESSION, "") if self._gate.sessions else ""
        return Leased(self._engines, session, self._gate.tries)

    async def stats(self) -> Stats:
        places = await self._engines.places()
        if not places:
            raise EndpointError(NOBODY)
        return await together([self._engines.client(place) for place in places])


class Gate:
    """Serves HTTP from creation on, in a thread of its own."""

    _server: Server | None = None
    """None: it could not even begin."""

    def __init__(
        self,
        gate: plan.Gate,
        engine: ServeSettings,
        handles: list[DeploymentHandle[Any]],
        many: list[int],
    ) -> None:
        files = find_model(engine.model or default_model()[0], weights=False)
        model = load_served(files.name, files.folder, gate.http.model_names, gate.http.tool_fallback)
        kinds = [Kind(handle, number) for handle, number in zip(handles, many, strict=True)]
        self._engines = Engines(kinds, engine.keys)
        app = application(model, Behind(self._engines, gate), gate.http)
        self._listener = Listener(gate.http)
        self._server = server = Server(config(app, gate.http))
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True, name="http")
        self._thread.start()

    def url(self) -> str:
        """Where it is reached."""
        return self._listener.url

    def visitor(self) -> Visitor:
        """As what it comes to engines."""
        return self._engines.visitor

    def __call__(self, request: Request) -> Response:
        """For those who come by the proxy that `serve run` starts: it brings nobody further."""
        return PlainTextResponse(f"This is Ray Serve's own proxy; the fleet's gate is at {self.url()}.\n", 421)

    def check_health(self) -> None:
        """Serve asks now and then. Raises EndpointError when nobody serves HTTP any more."""
        if not self._thread.is_alive():
            raise EndpointError("the gate's HTTP server has ended")

    def __del__(self) -> None:
        """Ray Serve's word for the end: answers that are nearly done may finish."""
        if self._server is not None:
            self._server.end()
            self._thread.join(DRAIN_SECONDS)

    def _serve(self, server: Server) -> None:
        self._engines.meet()
        server.run(sockets=[self._listener.socket])
