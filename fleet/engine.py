"""Engines: an actor each, which tells whoever leases it where to ask and ends, at once, when what it stands for does.

Tokens never pass through it. A lease is a stream that says the engine's place and then no more until one of both sides
goes, so that Ray Serve counts what is under way and its end is told to all who hold one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve

from outrider.fleet.doors import Doors
from outrider.fleet.drafter import Drafting
from outrider.fleet.place import Place, Visitor
from outrider.fleet.plan import Placed
from outrider.fleet.watch import Watch, check_same_weights
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import ServeSettings, Settings
from outrider.protocol.keyring import CLIENT
from outrider.protocol.messages import Stats

OWN_SECONDS = 4.0
"""How long its server may take to say what it does; after three times Serve starts another."""
GONE = 3
"""What the actor ends with when its engine has."""

log = logging.getLogger(__name__)


class Engine:
    """What all engines do once they know their `place`."""

    def __init__(self, place: Place, keys: Path | None = None) -> None:
        self._place = place
        self._client = AsyncClient(place.own or place.endpoint, OWN_SECONDS, keys=keys)
        self._gone = defaultdict[Visitor, asyncio.Event](asyncio.Event)

    async def lease(self, visitor: Visitor) -> AsyncIterator[Place]:
        """Where to ask; then nothing, until `visitor` has enough."""
        gone = self._welcome(visitor)
        yield self._place
        await gone.wait()

    async def place(self, visitor: Visitor | None = None) -> Place:
        """The same once, for whoever only looks."""
        if visitor is not None:
            self._welcome(visitor)
        return self._place

    async def report(self) -> tuple[Place, Stats]:
        """Where it is and what it does now, for whoever looks at the whole fleet."""
        return self._place, await self._client.stats()

    async def check_health(self) -> None:
        """Serve asks now and then. A lease outlives a gate that was killed: Ray tells nobody, so it is looked for."""
        for visitor in list(self._gone):
            if not await asyncio.to_thread(visitor.is_there):
                self._gone.pop(visitor).set()
                self.let_out(visitor.key)

    def _welcome(self, visitor: Visitor) -> asyncio.Event:
        """What is set when that gate is gone."""
        if visitor not in self._gone:
            self.let_in(visitor.key)
        return self._gone[visitor]

    def let_in(self, key: str) -> None:
        """Where keys are asked for, this one opens from now on."""

    def let_out(self, key: str) -> None:
        """It does so no more."""


class PlacedEngine(Engine):
    """A cluster on this host, which ends with this actor, and with which this actor ends."""

    def __init__(self, settings: ServeSettings, placed: Placed) -> None:
        self._doors = Doors()
        ours = ray.util.get_node_ip_address()
        elsewhere = placed.drafter.on == "other-host"
        reached = replace(settings, endpoint=f"tcp://{ours}:0", keyed=True, keys=self._doors.folder, pin_cores=False)
        if elsewhere:
            reached = replace(reached, workers_endpoint=f"tcp://{ours}:0", draft_backend="ngram", draft_model=None)
        self._cluster = LocalCluster(**keywords(reached))
        threading.Thread(target=self._end_with_it, daemon=True, name="engine").start()
        if elsewhere:
            Drafting(settings, self._cluster.joining_endpoint, self._doors).start()
        host = ray.get_runtime_context().get_node_id()
        super().__init__(Place(self._cluster.endpoint, self._doors.key, self._cluster.own_endpoint, host))

    async def check_health(self) -> None:
        """Raises EndpointError when the server hangs."""
        await self._client.stats()
        await super().check_health()

    def let_in(self, key: str) -> None:
        self._doors.open(CLIENT, key)

    def let_out(self, key: str) -> None:
        self._doors.shut(key)

    def _end_with_it(self) -> None:
        code = self._cluster.wait()
        log.error("the engine's server ended with code %s; another is placed", code)
        os._exit(GONE)


class AttachedEngine(Engine):
    """A server that somebody else keeps up: it is waited for, and with its loss this actor ends."""

    def __init__(self, endpoints: tuple[str, ...], keys: Path | None) -> None:
        own = serve.get_replica_context().rank.rank % len(endpoints)
        endpoint = endpoints[own]
        watch = Watch(endpoint, keys)
        watch.wait_until_there()
        check_same_weights(endpoint, endpoints[:own], keys)
        threading.Thread(target=self._end_with_it, args=(watch, endpoint), daemon=True, name="engine").start()
        super().__init__(Place(endpoint), keys)

    def _end_with_it(self, watch: Watch, endpoint: str) -> None:
        watch.wait_until_gone()
        log.error("the engine at %s is gone; it is waited for", endpoint)
        os._exit(GONE)


def keywords(settings: ServeSettings) -> Settings:
    """The settings as LocalCluster takes them."""
    found: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return cast("Settings", found)
