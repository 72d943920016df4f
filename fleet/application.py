"""A plan as Ray Serve takes it: which actors there are, what each needs of a host, how many.

serve run outrider.fleet:app plan=fleet.yaml

`SessionRouter`: which engine a request goes to: a session's own, else the one with the least under way. Ray Serve
asks, and keeps count.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from outrider.fleet.engine import AttachedEngine, PlacedEngine
from outrider.fleet.ingress import Ingress
from outrider.fleet.plan import FleetPlan, Placed


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """By itself Serve's spreads requests without a session by chance, and chance has some engines idle."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or pending_request.metadata.session_id or not candidate_replicas:
            return ranks
        return [random.sample(candidate_replicas, len(candidate_replicas))]


MOST_AT_ONCE = 10_000
"""Requests at one engine, whose own line is fair; Serve is to hold none back."""
HEAD = "node:__internal_head__"
LITTLE = 0.001
HEALTH_SECONDS = 2.0
ROUTING = RequestRouterConfig(request_router_class=SessionRouter)


def application(plan: FleetPlan) -> serve.Application:
    """All of the fleet, the gate before the others."""
    engines: list[serve.Application] = []
    many: list[int] = []
    if plan.placed is not None:
        placed: Any = serve.deployment(PlacedEngine, name="placed")
        options = {**_engine_options(), **_placing(plan.placed), **_number(plan)}
        engines.append(placed.options(**options).bind(plan.engine, plan.placed))
        many.append(plan.scale.max if plan.scale is not None else plan.placed.replicas)
    if plan.attached:
        attached: Any = serve.deployment(AttachedEngine, name="attached")
        options = {**_engine_options(), "num_replicas": len(plan.attached), "ray_actor_options": _at_head()}
        engines.append(attached.options(**options).bind(plan.attached, plan.engine.keys))
        many.append(len(plan.attached))
    gate: Any = serve.deployment(Ingress, name="gate")
    where: dict[str, Any] = {"ray_actor_options": _at_head()}
    if plan.gate.count > 1:  # a host each, for they have one port
        where = {"ray_actor_options": {"num_cpus": 0}, "max_replicas_per_node": 1}
    return gate.options(num_replicas=plan.gate.count, **where, **_watched()).bind(plan.gate, plan.engine, engines, many)


def app(arguments: dict[str, str]) -> serve.Application:
    """For `serve run`: the plan in the file that the argument `plan` names."""
    from outrider.fleet.plan_file import read_plan

    return application(read_plan(Path(arguments["plan"])))


def run(plan: FleetPlan, name: str = "outrider") -> None:
    """Has the fleet run on the Ray that this process is connected to; returns when Ray Serve has been told."""
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(plan), name=name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def _engine_options() -> dict[str, Any]:
    return {"max_ongoing_requests": MOST_AT_ONCE, "request_router_config": ROUTING, **_watched()}


def _watched() -> dict[str, Any]:
    return {"health_check_period_s": HEALTH_SECONDS, "graceful_shutdown_timeout_s": 5.0}


def _at_head() -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {HEAD: LITTLE}}


def _placing(placed: Placed) -> dict[str, Any]:
    """Where an engine goes, and its drafter if that has a host of its own."""
    own = placed.bundle().as_ray() or {"CPU": LITTLE}
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {named[name]: many for name, many in own.items() if name in named}
    options["resources"] = {name: many for name, many in own.items() if name not in named}
    if placed.drafter.on != "other-host":
        return {"ray_actor_options": {"num_cpus": 0, **options}}
    bundles = [own, placed.drafter.needs.as_ray() or {"CPU": LITTLE}]
    return {
        "ray_actor_options": {"num_cpus": 0, **options},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_SPREAD",
    }


def _number(plan: FleetPlan) -> dict[str, Any]:
    if plan.scale is None:
        return {"num_replicas": plan.placed.replicas if plan.placed is not None else 0}
    scale = plan.scale
    by_load = AutoscalingConfig(
        min_replicas=scale.min,
        max_replicas=scale.max,
        target_ongoing_requests=scale.requests_per_engine,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
    )
    return {"autoscaling_config": by_load}
