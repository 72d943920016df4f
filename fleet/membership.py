"""Checks whether this host can join a fleet: the head answers, accepts the token, and has the same versions and models.

It asks the head directly, before Ray is started here.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError, RpcError

from outrider import __version__
from outrider.fleet.host import RAY_NAMES, VERSION_LABEL
from outrider.orchestrator.pairing.model_files import find_model
from outrider.protocol.errors import EndpointError, KeyFault, ModelError, VersionMismatch

CONNECT_TIMEOUT_SECONDS = 5.0
EXPECTED_ADDRESS = "expected the address that `outrider fleet head` printed there"
ALIVE_STATE = 0
"""Ray's state of a live node."""
KV_NAMESPACE = b"outrider"
MODELS_KEY = b"models"
"""The key under which the head stores the fleet's models, one per line."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A host in Ray's cluster. `offers`: its resources by our names. `release`: its Outrider version, "" if unknown."""

    name: str
    alive: bool
    offers: Mapping[str, float]
    release: str


class FleetHead:
    """The head at `address`, HOST:PORT.

    Raises:
        EndpointError: it does not answer.
        KeyFault: it rejects this host's token.
    """

    def __init__(self, address: str) -> None:
        _check_reachable(address)
        try:
            with _muted_stderr():
                self._gcs = GcsClient(address=address)
        except AuthenticationError:
            raise KeyFault(
                f"the head at {address} refuses this host's token; expected a copy of the head's own token file"
            ) from None
        except RpcError:
            raise EndpointError(f"no head of a fleet answers at {address}; {EXPECTED_ADDRESS}") from None

    def check_versions(self) -> None:
        """Raises VersionMismatch if this host's versions differ from the head's, as far as these are known."""
        metadata = get_cluster_metadata(self._gcs) or {}
        outrider = next((node.release for node in self.nodes() if node.alive and node.release), "")
        for name, there, here in (
            ("Ray", metadata.get("ray_version"), ray.__version__),
            ("Python", metadata.get("python_version"), platform.python_version()),
            ("Outrider", outrider, __version__),
        ):
            if there and here != there:
                raise VersionMismatch(
                    f"the head has {name} {there} and this host {here}; expected the same on every host"
                )

    def nodes(self) -> list[RayNode]:
        """Returns all current and former hosts."""
        nodes = []
        for one in self._gcs.get_all_node_info().values():
            offers = {ours: one.resources_total.get(name, 0) for ours, name in RAY_NAMES.items()}
            release = dict(one.labels).get(VERSION_LABEL, "")
            nodes.append(RayNode(one.node_name, one.state == ALIVE_STATE, offers, release))
        return nodes

    def models(self) -> list[str]:
        """Returns the models whose files hosts need; empty if no fleet runs, or it runs the tiny pair."""
        found = self._gcs.internal_kv_get(MODELS_KEY, KV_NAMESPACE) or b""
        return found.decode().splitlines()

    def store_models(self, names: list[str]) -> None:
        """Stores the models that joining hosts need."""
        self._gcs.internal_kv_put(MODELS_KEY, "\n".join(names).encode(), True, KV_NAMESPACE)


def check_models(names: list[str]) -> None:
    """Raises ModelError if this host lacks a model."""
    for name in names:
        try:
            find_model(name)
        except ModelError as error:
            raise ModelError(f"this host lacks a model of the fleet: {error}") from None


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Hides stderr output of Ray's C++ code, which repeats errors that are raised here."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EndpointError(
            f"{address!r} is not the address of a head; expected HOST:PORT, as `outrider fleet head` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error) or "it does not answer"
        raise EndpointError(f"there is no head of a fleet at {address} ({why}); {EXPECTED_ADDRESS}") from None
