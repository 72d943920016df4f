"""The parts of a fleet that may be killed: how each is found, killed and repaired."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tools.fleet_failures.fleet import Engine, Fleet, process_at_port
from tools.fleet_failures.hosts import Hosts


@dataclass(frozen=True, slots=True)
class KillContext:
    """The `engine` that generates the texts, and the `ingress` at which they are read."""

    hosts: Hosts
    fleet: Fleet
    engine: Engine
    ingress: str


@dataclass(frozen=True, slots=True)
class KillPlan:
    """`kill` kills a part. `repair` does what launchd or an operator would do then; for most parts nothing."""

    kill: Callable[[], object]
    repair: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Victim:
    """A part to kill. `plan` finds its processes beforehand, so that the kill takes no time. `kind`: of the engine that
    generates the texts."""

    name: str
    plan: Callable[[KillContext], KillPlan]
    kind: str = "placed"


def make_kill(process: psutil.Process) -> Callable[[], None]:
    return lambda: process.send_signal(signal.SIGKILL)


def _node(scene: KillContext) -> KillPlan:
    node = scene.hosts.of(scene.engine.actor)
    return KillPlan(scene.hosts.loss(node), lambda: scene.hosts.replace(node, {"metal": 1}))


def _drafters_node(scene: KillContext) -> KillPlan:
    node = scene.hosts.of(scene.engine.drafter)
    return KillPlan(scene.hosts.loss(node), lambda: scene.hosts.replace(node, {"ane": 2}))


VICTIMS = (
    Victim("actor", lambda at: KillPlan(make_kill(at.engine.actor))),
    Victim("server", lambda at: KillPlan(make_kill(at.engine.server))),
    Victim("target", lambda at: KillPlan(make_kill(at.engine.target))),
    Victim("node", _node),
    Victim("drafter-node", _drafters_node),
    Victim(
        "attached", lambda at: KillPlan(make_kill(at.fleet.attached.process), at.fleet.attached.restart), "attached"
    ),
    Victim("ingress", lambda at: KillPlan(make_kill(process_at_port(at.ingress)))),
    Victim("controller", lambda at: KillPlan(make_kill(at.hosts.named("ray::ServeController")))),
    Victim("head", lambda at: KillPlan(make_kill(at.hosts.gcs), at.hosts.restart_head)),
)
