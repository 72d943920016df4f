"""A drafter on one of the hosts, started as a person would: `outrider worker draft --connect ENDPOINT`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.bench.two_hosts.namespace import Namespace
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.errors import WorkerError

PATIENCE_S = 60.0
LOOK_S = 0.05


@contextmanager
def drafter(client: Client, host: Namespace, endpoint: str, name: str, *options: str) -> Iterator[int]:
    """Runs until the end of the block, ready from its beginning; its process id."""
    command = python("-m", "outrider", "worker", "draft", "--connect", endpoint, "--name", name, *options)
    with host.entered():
        process = subprocess.Popen(command, env=child_environment())
    try:
        wait_for(client, name, "ready")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def state(client: Client, name: str) -> str:
    """What the cluster says of the worker of this name; empty: nothing."""
    return next((worker.state for worker in client.stats().workers if worker.name == name), "")


def wait_for(client: Client, name: str, wanted: str) -> float:
    """Until the worker is in this state; how long that took, in seconds. Raises WorkerError when it never is."""
    began = time.monotonic()
    while (found := state(client, name)) != wanted:
        if time.monotonic() > began + PATIENCE_S:
            raise WorkerError(f"{name} is {found or 'nowhere'} after {PATIENCE_S:.0f} s; expected {wanted}")
        time.sleep(LOOK_S)
    return time.monotonic() - began
