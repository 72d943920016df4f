"""Engine actors: clusters that Ray starts, servers that are attached, and drafters on hosts of their own.

Tokens and drafts do not pass through Ray. An actor ends when its engine does, and Serve replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import zmq
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.fleet.plan import Placed
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings, Settings, to_flags
from outrider.protocol.endpoints import Tcp, connect, find_client_keys, monitored_socket, receive_event
from outrider.protocol.errors import EndpointError, ModelError, ServerBusy, WorkerError
from outrider.protocol.keys import CLIENT, DRAFTER, AllowedKey, Keyring, parse_key
from outrider.protocol.messages import Stats, WorkerStats, is_serving
from outrider.protocol.socket_files import PrivateDirectory

log = logging.getLogger(__name__)

NAMESPACE = "serve"
"""The namespace of Ray Serve's actors. Their runtime contexts report another one."""

DRAFTER_BUNDLE = 1
"""The drafter's index in the placement group; the engine is 0."""

RESTART_DELAY_SECONDS = 1.0
DRAFTER_SETTINGS = (
    "model", "draft_model", "gguf_keep_precision", "draft_backend", "draft_device", "draft_prefill", "fan_out",
    "threads", "cpu_kernels", "log_level", "log_format",
)  # fmt: skip
"""The engine settings that its drafter needs."""

HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 300, 900
POLL_SECONDS = 0.5
CONNECTED, DISCONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED

HEALTH_TIMEOUT_SECONDS = 4.0
"""Timeout of a health check. After three failures Serve replaces the engine."""

ENGINE_GONE_CODE = 3
"""The actor's exit code when its engine has ended."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's client `endpoint`, and its server's public `key`; empty if the server needs none or it is trusted.

    `own`: an endpoint for the same `host` (a Ray node) without keys; empty if there is none.
    """

    endpoint: str
    key: str = ""
    own: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class IngressKey:
    """Identifies an ingress: its public key and its actor's name."""

    key: str
    actor: str

    def is_alive(self) -> bool:
        """Returns whether the actor is alive. Asks Ray, which may take a while."""
        try:
            ray.get_actor(self.actor, NAMESPACE)
        except ValueError:
            return False
        return True


class ActorKeyring(Keyring):
    """An actor's own key and the keys it accepts, in a `PrivateDirectory`. Thread-safe, as changes of a `Keyring`
    are."""

    def __init__(self) -> None:
        self._directory = PrivateDirectory()
        super().__init__(self._directory.path / "keys")
        self.key = self.make().public

    def allow_key(self, role: str, key: str) -> None:
        """Accepts this key for `role` (client, drafter). Raises KeyFault if it is not a key."""
        self.allow(AllowedKey(role, parse_key(key), f"{role}-{key}"))


class DrafterActor:
    """A draft worker on this host. It ends with this actor."""

    def __init__(self) -> None:
        self._keyring = ActorKeyring()

    def key(self) -> str:
        """Returns its public key."""
        return self._keyring.key

    def draft(self, settings: ServeSettings, endpoint: str, server_key: str) -> int:
        """Drafts for the server at `endpoint` until the worker ends, at the latest when this process does and its stdin
        closes; returns its exit code."""
        join = ["worker", "draft", "--connect", endpoint, "--server-key", server_key, "--parent-fd", "0"]
        join += ["--keys", str(self._keyring.folder), *to_flags(settings)]
        line = python("-m", "outrider", *join)
        with subprocess.Popen(line, stdin=subprocess.PIPE, env=child_environment()) as process:
            return process.wait()


def keep_drafter(settings: ServeSettings, endpoint: str, keyring: ActorKeyring) -> None:
    """Keeps one drafter for an engine, and places a new one when it is lost. Never returns."""
    settings = ServeSettings(**{name: getattr(settings, name) for name in DRAFTER_SETTINGS})
    there = PlacementGroupSchedulingStrategy(get_current_placement_group(), DRAFTER_BUNDLE)
    while True:
        drafter: Any = ray.remote(DrafterActor).options(num_cpus=0, scheduling_strategy=there).remote()
        key = ""
        try:
            key = ray.get(drafter.key.remote())
            keyring.allow_key(DRAFTER, key)
            code = ray.get(drafter.draft.remote(settings, endpoint, keyring.key))
            log.warning("the drafter ended with code %s; it is replaced", code)
        except RayError as error:
            log.warning("the drafter is lost (%s); it is replaced", type(error).__name__)
        if key:
            keyring.revoke(key)
        ray.kill(drafter)
        time.sleep(RESTART_DELAY_SECONDS)


def wait_until_ready(endpoint: str, keys: Path | None) -> None:
    """Returns when the server at `endpoint` admits requests.

    Raises:
        EndpointError: the endpoint is malformed.
        KeyFault: the server requires a key, and there is no accepted one in the folder `keys`.
    """
    client = Client(endpoint, timeout=1.0, keys=keys)
    while not is_serving(_workers(client)):
        time.sleep(POLL_SECONDS)


def wait_until_gone(endpoint: str, keys: Path | None) -> None:
    """Returns when the connection is lost, or not established within a second. Raises as `wait_until_ready`.

    ZeroMQ heartbeats detect a hanging server or a lost machine within a second, and an ended process at once.
    """
    with monitored_socket(CONNECTED | DISCONNECTED) as (socket, monitor):
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS
        connect(socket, endpoint, find_client_keys(endpoint, folder=keys))
        if monitor.poll(HEARTBEAT_TIMEOUT_MS):
            while receive_event(monitor)[0] != DISCONNECTED:
                pass


def _workers(client: Client) -> tuple[WorkerStats, ...]:
    """Returns the workers' statistics; none without an answer."""
    try:
        return client.stats().workers
    except (EndpointError, ServerBusy, WorkerError):
        return ()


def _weights_fingerprint(endpoint: str, keys: Path | None) -> str:
    """Returns the fingerprint of the target's weights and number format; empty without an answer."""
    workers = _workers(Client(endpoint, timeout=1.0, keys=keys))
    return next((one.fingerprint for one in workers if one.role == "target"), "")


def check_same_weights(endpoint: str, before: Sequence[str], keys: Path | None) -> None:
    """Raises ModelError if the server at `endpoint` has other weights than those in `before` that answer.

    Its texts would be another model's, and failover could not continue them.
    """
    ours = _weights_fingerprint(endpoint, keys)
    for other in before:
        theirs = _weights_fingerprint(other, keys)
        if ours and theirs and ours != theirs:
            raise ModelError(
                f"the engine at {endpoint} has other weights, or another number format, than the one at {other};"
                " expected the same model on every engine"
            )


def exit_after(wait: Callable[[], object], message: str) -> None:
    """Ends this actor's process when `wait` returns, and logs `message` with its result."""

    def watch() -> None:
        log.error("%s", message.format(wait()))
        os._exit(ENGINE_GONE_CODE)

    threading.Thread(target=watch, daemon=True, name="engine").start()


class EngineActor:
    """Common parts of engines, once their address is known. `keyring`: the ingresses' keys, if the engine needs any."""

    def __init__(self, place: EngineAddress, keyring: ActorKeyring | None, keys: Path | None = None) -> None:
        self._place, self._keyring = place, keyring
        self._client = AsyncClient(place.own or place.endpoint, HEALTH_TIMEOUT_SECONDS, keys=keys)
        self._gone = defaultdict[IngressKey, asyncio.Event](asyncio.Event)

    async def lease(self, ingress_key: IngressKey) -> AsyncIterator[EngineAddress]:
        """Yields the address, then stays open until either side ends it, so that Ray Serve counts the requests in
        progress, and the ingress notices at once when the engine ends."""
        if ingress_key not in self._gone and self._keyring is not None:
            self._keyring.allow_key(CLIENT, ingress_key.key)
        gone = self._gone[ingress_key]
        yield self._place
        await gone.wait()

    async def report(self) -> tuple[EngineAddress, Stats]:
        """Returns the address and current statistics."""
        return self._place, await self._client.stats()

    async def check_health(self) -> None:
        """Called by Serve. Also removes leases of ingresses that were killed, which Ray does not report.

        Raises:
            EndpointError: the server hangs.
            KeyFault: it refuses this side's key.
        """
        await self._client.stats()
        for ingress_key in list(self._gone):
            if not await asyncio.to_thread(ingress_key.is_alive):
                self._gone.pop(ingress_key).set()
                if self._keyring is not None:
                    self._keyring.revoke(ingress_key.key)


class PlacedEngine(EngineActor):
    """A cluster on this host. It ends with this actor, and the actor with it."""

    def __init__(self, settings: ServeSettings, placed: Placed) -> None:
        keyring, here = ActorKeyring(), str(Tcp(ray.util.get_node_ip_address(), 0))
        drafts_elsewhere = placed.drafter.on == "other-host"
        own: dict[str, Any] = {"endpoint": here, "keyed": True, "keys": keyring.folder, "pin_cores": False}
        if drafts_elsewhere:
            own |= {"workers_endpoint": here, "draft_backend": "ngram", "draft_model": None, "draft_prefill": "mlx"}
        self._cluster = LocalCluster(**cast("Settings", {**asdict(settings), **own}))
        exit_after(self._cluster.wait, "the engine's server ended with code {}; it is replaced")
        if drafts_elsewhere:
            drafting = (settings, self._cluster.joining_endpoint, keyring)
            threading.Thread(target=keep_drafter, args=drafting, daemon=True, name="drafting").start()
        host = ray.get_runtime_context().get_node_id()
        place = EngineAddress(self._cluster.endpoint, keyring.key, self._cluster.own_endpoint, host)
        super().__init__(place, keyring)


class AttachedEngine(EngineActor):
    """A server that is run by someone else. The actor waits for it, and ends when it is lost."""

    def __init__(self, endpoints: tuple[str, ...], keys: Path | None) -> None:
        own = serve.get_replica_context().rank.rank % len(endpoints)
        endpoint = endpoints[own]
        wait_until_ready(endpoint, keys)
        check_same_weights(endpoint, endpoints[:own], keys)
        exit_after(
            partial(wait_until_gone, endpoint, keys), f"the engine at {endpoint} is lost; waiting for its return"
        )
        super().__init__(EngineAddress(endpoint), None, keys)
