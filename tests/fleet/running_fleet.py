"""A running fleet for tests on simulated Ray hosts: requests to its ingress, its statistics, and processes to kill.

Ray is imported only where it is used, because this folder is also collected without Ray installed.
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
"""`PROMPT` and `SAMPLING` as a request to the HTTP API."""
TIMEOUT_S = 240.0
FAULT_AFTER_CHUNKS = 6
"""The number of chunks of a stream after which a fault is injected."""


def plain_text() -> str:
    """Returns the text of the target without a drafter, on a server without Ray."""
    with LocalCluster(draft_backend="none", mode="ar", memory=False) as alone:
        return alone.client().generate(PROMPT, SAMPLING, mode="ar", chat_template=False).text


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until the condition is true, and returns its value. Raises TimeoutError with the message `what`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise TimeoutError(what)


@dataclass(frozen=True)
class Fleet:
    """An application of Ray Serve with its ingress at `url`. `kind`: the deployment of its engines."""

    name: str
    kind: str
    url: str

    def addresses(self) -> list[EngineAddress]:
        """Returns the addresses of the running engines; [] if one has just died."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        engines = serve.get_deployment_handle(self.kind, self.name)
        try:
            return [place for place, _ in engines.broadcast("report").results(timeout_s=5)]
        except (RayError, RayServeException, TimeoutError):
            return []

    def stats(self) -> list[tuple[EngineAddress, Stats]]:
        """Returns the address and the statistics of each engine that answers."""
        found = []
        for place in self.addresses():
            try:
                found.append((place, Client(place.own or place.endpoint, timeout=1.0).stats()))
            except OutriderError:
                continue
        return found

    def is_complete(self, engines: int) -> bool:
        """Returns whether exactly `engines` engines have a ready target."""
        workers = [worker for _, one in self.stats() for worker in one.workers]
        return sum(worker.role == "target" and worker.state == "ready" for worker in workers) == engines

    def busy_engine(self) -> tuple[EngineAddress, Stats]:
        """Returns the engine with an active request, which must be the only one. Raises RuntimeError."""
        found = [one for one in self.stats() if one[1].active]
        if len(found) != 1:
            raise RuntimeError(f"expected one engine that has a text, found {len(found)}")
        return found[0]

    def stream(self, inject_fault: Callable[[], None] | None = None, session: str = "", **other: int) -> str:
        """Streams a completion from the ingress, and returns its text. Calls `inject_fault` in the middle."""
        headers = {"authorization": f"Bearer {KEY}", **({"x-session-id": session} if session else {})}
        texts: list[str] = []
        url, asked = f"{self.url}/v1/completions", {**BODY, **other, "stream": True}
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=TIMEOUT_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if len(texts) == FAULT_AFTER_CHUNKS and inject_fault is not None:
                        inject_fault()
        return "".join(texts)


def target_of(stats: Stats) -> psutil.Process:
    """Returns the process of an engine's target."""
    return psutil.Process(next(worker.pid for worker in stats.workers if worker.role == "target"))


def server_of(stats: Stats) -> psutil.Process:
    """Returns the process of an engine's `outrider serve`."""
    return _parent(target_of(stats))


def actor_of(stats: Stats) -> psutil.Process:
    """Returns the process of a placed engine's Ray actor."""
    return _parent(server_of(stats))


def _parent(process: psutil.Process) -> psutil.Process:
    found = process.parent()
    if found is None:
        raise RuntimeError(f"{process} has no parent")
    return found


def drafters_actor_of(stats: Stats) -> psutil.Process:
    """Returns the process of the Ray actor of an engine's drafter."""
    return _parent(psutil.Process(next(worker.pid for worker in stats.workers if worker.role == "draft")))


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@contextmanager
def running(plan: FleetPlan, name: str, engines: int) -> Iterator[Fleet]:
    """Deploys the plan to the connected Ray cluster, and waits until `engines` engines are ready."""
    from ray import serve

    from outrider.fleet.deployment import deploy

    deploy(plan, name)
    try:
        ingress = serve.get_deployment_handle("ingress", name)
        wait_until(lambda: serve.status().applications[name].deployments["ingress"].status == "HEALTHY", "no ingress")
        fleet = Fleet(name, "placed" if plan.placed is not None else "attached", ingress.url.remote().result())
        wait_until(lambda: fleet.is_complete(engines), f"no {engines} engines")
        yield fleet
    finally:
        serve.delete(name)
