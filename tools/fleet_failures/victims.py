"""What may be killed: how it is found before, what kills it, and who sees to it afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tools.fleet_failures.fleet import Engine, Fleet, at_port
from tools.fleet_failures.hosts import Hosts


@dataclass(frozen=True, slots=True)
class Scene:
    """Whose texts are under way: the `engine` that has them, and the `gate` that they are read at."""

    hosts: Hosts
    fleet: Fleet
    engine: Engine
    gate: str


@dataclass(frozen=True, slots=True)
class Blow:
    """`kill`, and what somebody would do about it then: a launchd, an owner with another host; most need nobody."""

    kill: Callable[[], object]
    mend: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Victim:
    """`aim` looks everything up, so that the blow itself takes no time. `kind` of the engine that has the texts."""

    name: str
    aim: Callable[[Scene], Blow]
    kind: str = "placed"


def killing(process: psutil.Process) -> Callable[[], None]:
    return lambda: process.send_signal(signal.SIGKILL)


def _node(scene: Scene) -> Blow:
    node = scene.hosts.of(scene.engine.actor)
    return Blow(scene.hosts.loss(node), lambda: scene.hosts.replaced(node, {"metal": 1}))


def _drafters_node(scene: Scene) -> Blow:
    node = scene.hosts.of(scene.engine.drafter)
    return Blow(scene.hosts.loss(node), lambda: scene.hosts.replaced(node, {"ane": 2}))


VICTIMS = (
    Victim("actor", lambda at: Blow(killing(at.engine.actor))),
    Victim("server", lambda at: Blow(killing(at.engine.server))),
    Victim("target", lambda at: Blow(killing(at.engine.target))),
    Victim("node", _node),
    Victim("drafter-node", _drafters_node),
    Victim("attached", lambda at: Blow(killing(at.fleet.attached.process), at.fleet.attached.again), "attached"),
    Victim("gate", lambda at: Blow(killing(at_port(at.gate)))),
    Victim("controller", lambda at: Blow(killing(at.hosts.named("ray::ServeController")))),
    Victim("head", lambda at: Blow(killing(at.hosts.gcs), at.hosts.head_again)),
)
PROXY = "proxy"
"""There is none: each gate serves HTTP itself."""
