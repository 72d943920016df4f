"""A running fleet for tests: simulated hosts of Ray on this machine, clients of an ingress, and parts to kill.

Ray is imported only where it is used: the plain tests collect this folder without Ray installed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from outrider import Client, LocalCluster, SamplingParams
from outrider.fleet.plan import FleetPlan
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats

if TYPE_CHECKING:
    from outrider.fleet.engine import EngineAddress

KEY = "a-key-of-the-tests"
PROMPT = "def find_all(pattern, text):\n"
SAMPLING = SamplingParams(max_tokens=240, temp=0.8, seed=7, ignore_eos=True)
BODY = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0.8, "seed": 7, "ignore_eos": True}
"""The same as the API has it."""
PATIENCE = 240.0
STRIKE = 6
"""A stream is struck after so many chunks."""


def plain_text() -> str:
    """Returns the text of the target without a drafter, on a server without Ray."""
    with LocalCluster(draft_backend="none", mode="ar", memory=False) as alone:
        return alone.client().generate(PROMPT, SAMPLING, mode="ar", chat_template=False).text


def until(true: Callable[[], Any], what: str) -> Any:
    """Waits until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.1)
    raise TimeoutError(what)


@dataclass(frozen=True)
class Fleet:
    """An application of Ray Serve: its ingress at `url`, and its engines, of the deployment `kind`."""

    name: str
    kind: str
    url: str

    def places(self) -> list[EngineAddress]:
        """The addresses of the running engines."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        engines = serve.get_deployment_handle(self.kind, self.name)
        try:
            found: list[EngineAddress] = engines.broadcast("place").results(timeout_s=5)
        except (RayError, RayServeException, TimeoutError):  # one has just died
            return []
        return found

    def stats(self) -> list[tuple[EngineAddress, Stats]]:
        """The statistics of each engine."""
        found = []
        for place in self.places():
            try:
                found.append((place, Client(place.own or place.endpoint, timeout=1.0).stats()))
            except OutriderError:
                continue
        return found

    def whole(self, engines: int) -> bool:
        """Whether that many engines have a target that is ready."""
        workers = [worker for _, one in self.stats() for worker in one.workers]
        return sum(worker.role == "target" and worker.state == "ready" for worker in workers) == engines

    def busy(self) -> tuple[EngineAddress, Stats]:
        """The engine that has a request."""
        found = [one for one in self.stats() if one[1].active]
        if len(found) != 1:
            raise RuntimeError(f"expected one engine that has a text, found {len(found)}")
        return found[0]

    def stream(self, struck: Callable[[], None] | None = None, session: str = "", **other: int) -> str:
        """Returns the text that a client of the API receives; `struck` is called in the middle."""
        headers = {"authorization": f"Bearer {KEY}", **({"x-session-id": session} if session else {})}
        texts: list[str] = []
        url, asked = f"{self.url}/v1/completions", {**BODY, **other, "stream": True}
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if len(texts) == STRIKE and struck is not None:
                        struck()
        return "".join(texts)


def target_of(stats: Stats) -> psutil.Process:
    """The target's process."""
    return psutil.Process(next(worker.pid for worker in stats.workers if worker.role == "target"))


def server_of(stats: Stats) -> psutil.Process:
    """`outrider serve`."""
    return _parent(target_of(stats))


def actor_of(stats: Stats) -> psutil.Process:
    """The placed engine's actor."""
    return _parent(server_of(stats))


def _parent(process: psutil.Process) -> psutil.Process:
    found = process.parent()
    if found is None:
        raise RuntimeError(f"{process} has no parent")
    return found


def drafters_actor_of(stats: Stats) -> psutil.Process:
    """The actor of the drafter that has joined."""
    return _parent(psutil.Process(next(worker.pid for worker in stats.workers if worker.role == "draft")))


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@contextmanager
def running(plan: FleetPlan, name: str, engines: int) -> Iterator[Fleet]:
    """Runs the plan in the Ray that this process is connected to, and waits until it is complete."""
    from ray import serve

    from outrider.fleet.deployment import deploy

    deploy(plan, name)
    try:
        ingress = serve.get_deployment_handle("ingress", name)
        until(lambda: serve.status().applications[name].deployments["ingress"].status == "HEALTHY", "no ingress")
        fleet = Fleet(name, "placed" if plan.placed is not None else "attached", ingress.url.remote().result())
        until(lambda: fleet.whole(engines), f"no {engines} engines")
        yield fleet
    finally:
        serve.delete(name)
