"""The fleet under test: what runs where, by what the engines say of their processes, and whether it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import psutil

from outrider.fleet.host import Resources
from outrider.fleet.plan import DrafterPlan, FleetPlan, IngressPlan, Placed
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import OutriderError, WorkerError
from outrider.protocol.messages import Stats

NAME, GATES, PLACED = "failures", 2, 2
DRAFTER = DrafterPlan(on="other-host", needs=Resources(ane=1))
ASK_SECONDS, PATIENCE, LOOK_SECONDS = 2.0, 180.0, 0.05


@dataclass(frozen=True, slots=True)
class Engine:
    """One that answers; `kind` is placed or attached."""

    kind: str
    endpoint: str
    stats: Stats

    @property
    def target(self) -> psutil.Process:
        return psutil.Process(self._worker("target"))

    @property
    def server(self) -> psutil.Process:
        """`outrider serve`."""
        return self.target.parents()[0]

    @property
    def actor(self) -> psutil.Process:
        """What Ray started, if it is placed."""
        return self.server.parents()[0]

    @property
    def drafter(self) -> psutil.Process:
        return psutil.Process(self._worker("draft"))

    @property
    def is_whole(self) -> bool:
        """Whether its target and a drafter are at work."""
        return all(self._ready(role) for role in ("target", "draft"))

    def _worker(self, role: str) -> int:
        return self._ready(role)[0]

    def _ready(self, role: str) -> list[int]:
        ready = [one.pid for one in self.stats.workers if one.role == role and one.state == "ready"]
        return [
            pid for pid in ready if psutil.pid_exists(pid)
        ]  # the last word of one that is dead is not yet forgotten


class Attached:
    """A server that is kept up as launchd or systemd would: started again at its old address."""

    def __init__(self) -> None:
        self._server = LocalCluster(endpoint="tcp://127.0.0.1:0", memory=False, pin_cores=False)
        self.endpoint = self._server.endpoint

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._server.pid)

    def again(self) -> None:
        """Returns when it serves."""
        self._server.wait()
        self._server = LocalCluster(endpoint=self.endpoint, memory=False, pin_cores=False)

    def close(self) -> None:
        with suppress(OutriderError):
            self._server.close()


class Fleet:
    """Two gates, two placed engines whose drafters have hosts of their own, and the `attached` one."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached

    def gates(self) -> list[str]:
        """The URLs of those that are there."""
        return sorted(told("gate", "url"))

    def engines(self) -> list[Engine]:
        """Those that answer."""
        found = []
        for kind in ("placed", "attached"):
            for place in told(kind, "place"):
                endpoint = place.own or place.endpoint
                with suppress(OutriderError):
                    found.append(Engine(kind, endpoint, Client(endpoint, ASK_SECONDS / 2).stats()))
        return found

    @property
    def is_whole(self) -> bool:
        """All that there should be is there, the controller too."""
        if not self._healthy() or len(self.gates()) != GATES or not all(map(answers, self.gates())):
            return False
        engines = [engine.kind for engine in self.engines() if engine.is_whole]
        return sorted(engines) == ["attached", *["placed"] * PLACED]

    def wait_until_whole(self) -> None:
        """
        Raises:
            WorkerError: it does not become so.
        """
        until(lambda: self.is_whole, "the fleet does not become whole")

    def _healthy(self) -> bool:
        from ray import serve

        try:
            app = serve.status().applications[NAME]
        except KeyError:
            return False
        except _lost():
            return False
        return all(one.status == "HEALTHY" for one in app.deployments.values())


@contextmanager
def running() -> Iterator[Fleet]:
    """The fleet, whole, on the hosts that this process is connected to."""
    from ray import serve

    from outrider.fleet.deployment import run

    attached = Attached()
    try:
        gate = IngressPlan(count=GATES, http=HttpSettings(port=0))
        placed = Placed(PLACED, Resources(metal=1), DRAFTER)
        run(FleetPlan(ServeSettings(memory=False), placed, (attached.endpoint,), gate), NAME)
        fleet = Fleet(attached)
        fleet.wait_until_whole()
        yield fleet
    finally:
        serve.shutdown()
        attached.close()


def told(kind: str, method: str, name: str = NAME) -> list[Any]:
    """What all actors of a kind say; nothing where they can't be asked."""
    from ray import serve

    try:
        handle = serve.get_deployment_handle(kind, name)
        found: list[Any] = handle.broadcast(method).results(timeout_s=ASK_SECONDS)
    except _lost():
        return []
    return found


def until(true: Callable[[], object], otherwise: str) -> None:
    """Waits for it. Raises WorkerError."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise WorkerError(f"{otherwise}, after {PATIENCE:g} s")
        time.sleep(LOOK_SECONDS)


def answers(gate: str) -> bool:
    """Whether it says that it is ready."""
    connection = HTTPConnection(urlsplit(gate).netloc, timeout=ASK_SECONDS)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def at_port(url: str) -> psutil.Process:
    """The process that listens there."""
    port = urlsplit(url).port
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return psutil.Process(next(one.pid for one in listening if one.laddr[1:] == (port,)))


def _lost() -> tuple[type[Exception], ...]:
    """What Ray says while a part of it is away."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return (RayError, RayServeException, TimeoutError)
