"""The fleet under test: starts it, finds its processes by the engines' stats, and checks whether it is complete."""

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
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import OutriderError, WorkerError
from outrider.protocol.messages import Stats

NAME, INGRESS_COUNT, PLACED_COUNT = "failures", 2, 2
DRAFTER = DrafterPlan(on="other-host", needs=Resources(ane=1))
ASK_TIMEOUT_SECONDS, WAIT_TIMEOUT_SECONDS, POLL_SECONDS = 2.0, 180.0, 0.05


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answers; `kind` is placed or attached."""

    kind: str
    endpoint: str
    stats: Stats

    @property
    def target(self) -> psutil.Process:
        return psutil.Process(self._worker("target"))

    @property
    def server(self) -> psutil.Process:
        """The process of `outrider serve`."""
        return self.target.parents()[0]

    @property
    def actor(self) -> psutil.Process:
        """The process that Ray started, for a placed engine."""
        return self.server.parents()[0]

    @property
    def drafter(self) -> psutil.Process:
        return psutil.Process(self._worker("draft"))

    @property
    def is_complete(self) -> bool:
        """Whether the target and a drafter are ready."""
        return all(self._ready(role) for role in ("target", "draft"))

    def _worker(self, role: str) -> int:
        return self._ready(role)[0]

    def _ready(self, role: str) -> list[int]:
        ready = [worker.pid for worker in self.stats.workers if worker.role == role and worker.state == "ready"]
        return [pid for pid in ready if psutil.pid_exists(pid)]  # stats may still list a worker that has died


class Attached:
    """A server that is restarted at the same address, as by launchd or systemd."""

    def __init__(self) -> None:
        self._server = LocalCluster(endpoint="tcp://127.0.0.1:0", memory=False, pin_cores=False)
        self.endpoint = self._server.endpoint

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._server.pid)

    def restart(self) -> None:
        """Returns when the server is ready."""
        self._server.wait()
        self._server = LocalCluster(endpoint=self.endpoint, memory=False, pin_cores=False)

    def close(self) -> None:
        with suppress(OutriderError):
            self._server.close()


class Fleet:
    """Two ingresses, two placed engines whose drafters have hosts of their own, and the `attached` engine."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached

    def ingresses(self) -> list[str]:
        """Returns the URLs of the ingresses that run."""
        return sorted(broadcast("ingress", "url"))

    def engines(self) -> list[Engine]:
        """Returns the engines that answer."""
        engines = []
        for kind in ("placed", "attached"):
            for place, _ in broadcast(kind, "report"):
                endpoint = place.own or place.endpoint
                with suppress(OutriderError):
                    engines.append(Engine(kind, endpoint, Client(endpoint, ASK_TIMEOUT_SECONDS / 2).stats()))
        return engines

    @property
    def is_complete(self) -> bool:
        """Whether all ingresses, engines and drafters and the controller work."""
        if not self._healthy() or len(self.ingresses()) != INGRESS_COUNT or not all(map(is_ready, self.ingresses())):
            return False
        engines = [engine.kind for engine in self.engines() if engine.is_complete]
        return sorted(engines) == ["attached", *["placed"] * PLACED_COUNT]

    def wait_until_complete(self) -> None:
        """Waits until the fleet is complete.

        Raises:
            WorkerError: it is not in time.
        """
        wait_until(lambda: self.is_complete, "the fleet does not become complete")

    def _healthy(self) -> bool:
        from ray import serve

        try:
            app = serve.status().applications[NAME]
        except KeyError:
            return False
        except _ray_errors():
            return False
        return all(deployment.status == "HEALTHY" for deployment in app.deployments.values())


@contextmanager
def run_fleet() -> Iterator[Fleet]:
    """Runs the complete fleet on the hosts that this process is connected to."""
    from ray import serve

    from outrider.fleet.deployment import deploy

    attached = Attached()
    try:
        ingress = IngressPlan(count=INGRESS_COUNT, port=0)
        placed = Placed(PLACED_COUNT, Resources(metal=1), DRAFTER)
        deploy(FleetPlan(ServeSettings(memory=False), placed, (attached.endpoint,), ingress), NAME)
        fleet = Fleet(attached)
        fleet.wait_until_complete()
        yield fleet
    finally:
        serve.shutdown()
        attached.close()


def broadcast(kind: str, method: str, name: str = NAME) -> list[Any]:
    """Calls a method of all actors of a kind, and returns the results; none if the actors do not answer."""
    from ray import serve

    try:
        handle = serve.get_deployment_handle(kind, name)
        results: list[Any] = handle.broadcast(method).results(timeout_s=ASK_TIMEOUT_SECONDS)
    except _ray_errors():
        return []
    return results


def wait_until(condition: Callable[[], object], otherwise: str) -> None:
    """Waits for a condition. Raises WorkerError after `WAIT_TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + WAIT_TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise WorkerError(f"{otherwise} within {WAIT_TIMEOUT_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def is_ready(ingress: str) -> bool:
    """Whether the ingress reports that it is ready."""
    connection = HTTPConnection(urlsplit(ingress).netloc, timeout=ASK_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def process_at_port(url: str) -> psutil.Process:
    """Returns the process that listens at this URL's port."""
    port = urlsplit(url).port
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    return psutil.Process(next(c.pid for c in listening if c.laddr[1:] == (port,)))


def _ray_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that Ray raises while a part of it is away."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return (RayError, RayServeException, TimeoutError)
