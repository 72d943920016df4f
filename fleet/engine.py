"""What gate and engine tell each other: who asks, where an engine is, and by which keys.

`EngineAddress`: who asks for an engine, and where it is: what gate and engine tell each other. Opens no socket.

`ActorKeyring`: a key of one actor's own, and whose keys it lets in: in a directory that goes with the actor, however that
goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import ray
import zmq
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from zmq.utils.monitor import recv_monitor_message

from outrider.fleet.plan import Placed
from outrider.orchestrator.client.client import AsyncClient, Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import Sweeper, child_environment, python
from outrider.orchestrator.settings import ServeSettings, Settings, flags
from outrider.protocol.directory import private_directory
from outrider.protocol.endpoints import connect
from outrider.protocol.errors import EndpointError, ModelError, ServerBusy, WorkerError
from outrider.protocol.keyring import CLIENT, DRAFTER, AllowedKey, Keyring
from outrider.protocol.keys import parse_key
from outrider.protocol.messages import Stats, WorkerStats


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's clients come to `endpoint`, whose server has `key`; empty: it asks for none, or a known one.

    `own`: where those of the same `host` (a node of Ray's) may come without keys; empty: nowhere.
    """

    endpoint: str
    key: str = ""
    own: str = ""
    host: str = ""

    def seen_from(self, host: str) -> EngineAddress:
        """The shortest way from there."""
        return EngineAddress(self.own) if self.own and host == self.host else self


@dataclass(frozen=True, slots=True)
class IngressKey:
    """A gate: the public `key` that it comes with, and its actor's name."""

    key: str
    actor: str
    namespace: str

    def is_there(self) -> bool:
        """Whether its actor lives. Asks Ray, which may take a while."""
        try:
            ray.get_actor(self.actor, self.namespace)
        except ValueError:
            return False
        return True


def ingress_key(key: str) -> IngressKey:
    """This actor, with that key. Its namespace is Serve's, not the one that Ray says it runs in."""
    own = ray.get_runtime_context().get_actor_name() or ""
    named = ray.util.list_named_actors(all_namespaces=True)
    return IngressKey(key, own, next(one["namespace"] for one in named if one["name"] == own))


class ActorKeyring:
    """`folder` is where the keys are, `key` the public half of the own one. Any thread may open and shut."""

    def __init__(self) -> None:
        self._directory = private_directory()
        self._sweeper = Sweeper(self._directory.path, None)
        self._ring = Keyring(self._directory.path / "keys")
        self._changing = threading.Lock()
        self.folder = self._ring.folder
        self.key = self._ring.make().public

    def open(self, role: str, key: str) -> None:
        """Lets whoever has this key in as a `role` (client, drafter).

        Raises:
            KeyFault: it is no key.
        """
        with self._changing:
            self._ring.allow(AllowedKey(role, parse_key(key), f"{role}-{key}"))

    def shut(self, key: str) -> None:
        """Lets that key in no more."""
        with self._changing:
            self._ring.revoke(key)


BUNDLE = 1
"""Its place in the engine's placement group, behind the engine's own."""
AGAIN_SECONDS = 1.0
OWN = (
    "model", "draft_model", "draft_backend", "draft_prefill", "fan_out", "replay", "simulate", "threads", "cpu_kernels",
    "log_level", "log_format",
)  # fmt: skip
"""What a drafter is told of an engine's settings."""

log = logging.getLogger(__name__)


class DrafterActor:
    """A draft worker on this host, which ends with this actor."""

    def __init__(self) -> None:
        self._keyring = ActorKeyring()

    def key(self) -> str:
        """The public key that it comes with."""
        return self._keyring.key

    def draft(self, settings: ServeSettings, endpoint: str, server_key: str) -> int:
        """Drafts for the server at `endpoint`, whose key this is; returns the worker's exit code when it has ended."""
        theirs, lifeline = os.pipe()
        join = ["worker", "draft", "--connect", endpoint, "--server-key", server_key, "--parent-fd", str(theirs)]
        join += ["--keys", str(self._keyring.folder), *flags(settings)]
        process = subprocess.Popen(
            python("-m", "outrider", *join), stdin=subprocess.DEVNULL, env=child_environment(), pass_fds=(theirs,)
        )
        os.close(theirs)
        try:
            return process.wait()
        finally:
            os.close(lifeline)


class DrafterKeeper(threading.Thread):
    """Sees to it that an engine has a drafter: another one, when its own is gone, as soon as a host has room."""

    def __init__(self, settings: ServeSettings, endpoint: str, doors: ActorKeyring) -> None:
        super().__init__(daemon=True, name="drafting")
        self._settings = ServeSettings(**{name: getattr(settings, name) for name in OWN})
        self._endpoint, self._keyring = endpoint, doors

    def run(self) -> None:
        while True:
            drafter: Any = _placed().remote()
            key = ""
            try:
                key = ray.get(drafter.key.remote())
                self._keyring.open(DRAFTER, key)
                code = ray.get(drafter.draft.remote(self._settings, self._endpoint, self._keyring.key))
                log.warning("the drafter ended with code %s; another is placed", code)
            except RayError as error:
                log.warning("the drafter is lost (%s); another is placed", type(error).__name__)
            if key:
                self._keyring.shut(key)
            ray.kill(drafter)
            time.sleep(AGAIN_SECONDS)


def _placed() -> Any:
    """Where the engine's placement group has it."""
    group = get_current_placement_group()
    there = PlacementGroupSchedulingStrategy(group, BUNDLE)
    return ray.remote(DrafterActor).options(num_cpus=0, scheduling_strategy=there)


ASK_MS, SILENT_MS = 300, 900
LOOK_SECONDS = 0.5
COMES, GOES = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class ServerWatch:
    """Of the server at `endpoint`, which lets in the key in the folder `keys`.

    Raises:
        KeyFault: of every method too: it asks for keys, and there are none that it lets in.
    """

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        self._endpoint = endpoint
        self._keys = Keyring(keys).to_reach(endpoint)
        self._client = Client(endpoint, timeout=1.0, keys=keys)

    def wait_until_there(self) -> None:
        """Returns when it serves, its target loaded."""
        while not self._serves():
            time.sleep(LOOK_SECONDS)

    def weights(self) -> str:
        """By what its target's weights and number format are known; empty: it does not answer."""
        return next((one.fingerprint for one in self._workers() if one.role == "target"), "")

    def wait_until_gone(self) -> None:
        """Returns when its connection is lost, or there is none within a second."""
        context: zmq.Context[Any] = zmq.Context.instance()
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.heartbeat_ivl, socket.heartbeat_timeout = ASK_MS, SILENT_MS
            monitor = socket.get_monitor_socket(COMES | GOES)
            try:
                connect(socket, self._endpoint, self._keys)
                if monitor.poll(SILENT_MS):
                    while recv_monitor_message(monitor)["event"] != GOES:
                        pass
            finally:
                socket.disable_monitor()
                monitor.close(linger=0)

    def _serves(self) -> bool:
        return any(worker.role == "target" and worker.state == "ready" for worker in self._workers())

    def _workers(self) -> tuple[WorkerStats, ...]:
        """What it says of them; none while it does not answer."""
        try:
            return self._client.stats().workers
        except (EndpointError, ServerBusy, WorkerError):
            return ()


def check_same_weights(endpoint: str, before: Sequence[str], keys: Path | None) -> None:
    """Raises ModelError where the server at `endpoint` has others than one of those before it, as far as they answer:
    its texts would be another model's, and none could go on with it.
    """
    ours = ServerWatch(endpoint, keys).weights()
    for other in before:
        theirs = ServerWatch(other, keys).weights()
        if ours and theirs and ours != theirs:
            raise ModelError(
                f"the engine at {endpoint} has other weights, or another number format, than the one at {other};"
                " expected the same model on every engine"
            )


OWN_SECONDS = 4.0
"""How long its server may take to say what it does; after three times Serve starts another."""
GONE = 3
"""What the actor ends with when its engine has."""


class EngineActor:
    """What all engines do once they know their `place`."""

    def __init__(self, place: EngineAddress, keys: Path | None = None) -> None:
        self._place = place
        self._client = AsyncClient(place.own or place.endpoint, OWN_SECONDS, keys=keys)
        self._gone = defaultdict[IngressKey, asyncio.Event](asyncio.Event)

    async def lease(self, ingress_key: IngressKey) -> AsyncIterator[EngineAddress]:
        """Where to ask; then nothing, until `visitor` has enough."""
        gone = self._register(ingress_key)
        yield self._place
        await gone.wait()

    async def place(self, ingress_key: IngressKey | None = None) -> EngineAddress:
        """The same once, for whoever only looks."""
        if ingress_key is not None:
            self._register(ingress_key)
        return self._place

    async def report(self) -> tuple[EngineAddress, Stats]:
        """Where it is and what it does now, for whoever looks at the whole fleet."""
        return self._place, await self._client.stats()

    async def check_health(self) -> None:
        """Serve asks now and then. A lease outlives a gate that was killed: Ray tells nobody, so it is looked for."""
        for ingress_key in list(self._gone):
            if not await asyncio.to_thread(ingress_key.is_there):
                self._gone.pop(ingress_key).set()
                self.revoke(ingress_key.key)

    def _register(self, ingress_key: IngressKey) -> asyncio.Event:
        """What is set when that gate is gone."""
        if ingress_key not in self._gone:
            self.allow(ingress_key.key)
        return self._gone[ingress_key]

    def allow(self, key: str) -> None:
        """Where keys are asked for, this one opens from now on."""

    def revoke(self, key: str) -> None:
        """It does so no more."""


class PlacedEngine(EngineActor):
    """A cluster on this host, which ends with this actor, and with which this actor ends."""

    def __init__(self, settings: ServeSettings, placed: Placed) -> None:
        self._keyring = ActorKeyring()
        ours = ray.util.get_node_ip_address()
        elsewhere = placed.drafter.on == "other-host"
        reached = replace(settings, endpoint=f"tcp://{ours}:0", keyed=True, keys=self._keyring.folder, pin_cores=False)
        if elsewhere:
            reached = replace(reached, workers_endpoint=f"tcp://{ours}:0", draft_backend="ngram", draft_model=None)
        self._cluster = LocalCluster(**keywords(reached))
        threading.Thread(target=self._end_with_it, daemon=True, name="engine").start()
        if elsewhere:
            DrafterKeeper(settings, self._cluster.joining_endpoint, self._keyring).start()
        host = ray.get_runtime_context().get_node_id()
        super().__init__(EngineAddress(self._cluster.endpoint, self._keyring.key, self._cluster.own_endpoint, host))

    async def check_health(self) -> None:
        """Raises EndpointError when the server hangs."""
        await self._client.stats()
        await super().check_health()

    def allow(self, key: str) -> None:
        self._keyring.open(CLIENT, key)

    def revoke(self, key: str) -> None:
        self._keyring.shut(key)

    def _end_with_it(self) -> None:
        code = self._cluster.wait()
        log.error("the engine's server ended with code %s; another is placed", code)
        os._exit(GONE)


class AttachedEngine(EngineActor):
    """A server that somebody else keeps up: it is waited for, and with its loss this actor ends."""

    def __init__(self, endpoints: tuple[str, ...], keys: Path | None) -> None:
        own = serve.get_replica_context().rank.rank % len(endpoints)
        endpoint = endpoints[own]
        watch = ServerWatch(endpoint, keys)
        watch.wait_until_there()
        check_same_weights(endpoint, endpoints[:own], keys)
        threading.Thread(target=self._end_with_it, args=(watch, endpoint), daemon=True, name="engine").start()
        super().__init__(EngineAddress(endpoint), keys)

    def _end_with_it(self, watch: ServerWatch, endpoint: str) -> None:
        watch.wait_until_gone()
        log.error("the engine at %s is gone; it is waited for", endpoint)
        os._exit(GONE)


def keywords(settings: ServeSettings) -> Settings:
    """The settings as LocalCluster takes them."""
    found: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return cast("Settings", found)
