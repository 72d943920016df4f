"""Runs a drafter by `outrider worker draft --connect ENDPOINT`, and a cluster with its only drafter on another host.

Server and drafter have keys and know each other's, because the link between the hosts is not loopback.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import Settings
from outrider.protocol.errors import WorkerError
from outrider.protocol.keys import DRAFTER, SERVER, AllowedKey, Keyring
from tests.harness.two_hosts.hosts import ADDRESS, TwoHosts
from tests.harness.two_hosts.namespace import Namespace

NAME = "far"
_ADDRESS_AND_PORT = f"{ADDRESS}:7000"
TIMEOUT_S = 120.0
POLL_S = 0.05


@contextmanager
def remote_cluster(hosts: TwoHosts, options: Sequence[str] = (), **settings: Unpack[Settings]) -> Iterator[Client]:
    """Runs a cluster on one host with its only drafter, `NAME`, on the other. `options`: flags of the drafter."""
    endpoint = f"tcp://{_ADDRESS_AND_PORT}"
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        Keyring(theirs).allow(AllowedKey(SERVER, Keyring(ours).make().public, _ADDRESS_AND_PORT))
        Keyring(ours).allow(AllowedKey(DRAFTER, Keyring(theirs).make().public, NAME))
        settings |= Settings(draft_backend="ngram", workers_endpoint=endpoint, keys=ours)
        with hosts.here.entered():
            cluster = LocalCluster(**settings)
        with cluster:
            client = cluster.client(timeout=TIMEOUT_S)
            with run_drafter(client, hosts.there, endpoint, NAME, "--keys", str(theirs), *options):
                yield client


@contextmanager
def run_drafter(client: Client, host: Namespace, endpoint: str, name: str, *options: str) -> Iterator[None]:
    """Runs a drafter during the block, and waits until it is ready before the block begins."""
    command = python("-m", "outrider", "worker", "draft", "--connect", endpoint, "--name", name, *options)
    with host.entered():
        process = subprocess.Popen(command, env=child_environment())
    try:
        wait_for_state(client, name, "ready")
        yield
    finally:
        process.kill()
        process.wait()


def state(client: Client, name: str) -> str:
    """Returns the state of the worker with this name; empty if the cluster does not know it."""
    return next((worker.state for worker in client.stats().workers if worker.name == name), "")


def wait_for_state(client: Client, name: str, expected: str) -> float:
    """Waits until the worker has this state, and returns the seconds. Raises WorkerError after `TIMEOUT_S`."""
    began = time.monotonic()
    while (found := state(client, name)) != expected:
        if time.monotonic() > began + TIMEOUT_S:
            raise WorkerError(f"{name} is {found or 'unknown'} after {TIMEOUT_S:.0f} s; expected {expected}")
        time.sleep(POLL_S)
    return time.monotonic() - began
