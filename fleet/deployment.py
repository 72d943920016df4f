"""A plan as a Ray Serve application: deploys it, reports its state and shuts it down.

`serve run outrider.fleet.deployment:app plan=fleet.yaml` deploys `app` directly. The commands run in a process of their
own, which the deployment outlives.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica
from ray.serve.schema import ApplicationStatusOverview

from outrider.fleet.engine import AttachedEngine, EngineAddress, PlacedEngine
from outrider.fleet.ingress import Ingress
from outrider.fleet.membership import FleetHead, RayNode
from outrider.fleet.plan import FleetPlan, Placed, check_fits, read_plan
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.orchestrator.pairing.model_files import find_model
from outrider.protocol.errors import EndpointError, OutriderError, WorkerError, find_class, first_line
from outrider.protocol.messages import Stats

MAX_ONGOING_REQUESTS = 10_000
"""Requests per engine. Engines queue fairly themselves, so Serve should not queue."""

HEAD_RESOURCE = "node:__internal_head__"
MIN_SHARE = 0.001
HEALTH_PERIOD_SECONDS = 2.0
APP_NAME = "outrider"
POLL_SECONDS = 0.5
ANSWER_TIMEOUT_SECONDS = 10.0
ENGINE_KINDS = ("placed", "attached")


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Routes a session to its own engine, and other requests to the least busy one. Serve's router would spread the
    latter randomly."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or pending_request.metadata.session_id or not candidate_replicas:
            return ranks
        return [random.sample(candidate_replicas, len(candidate_replicas))]


ROUTER_CONFIG = RequestRouterConfig(request_router_class=SessionRouter)


def application(plan: FleetPlan) -> serve.Application:
    """Returns the whole fleet, with the ingress as its entry point."""
    health_options: dict[str, Any] = {
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "graceful_shutdown_timeout_s": 5.0,
    }
    engine_options = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "request_router_config": ROUTER_CONFIG,
        **health_options,
    }
    at_head = {"num_cpus": 0, "resources": {HEAD_RESOURCE: MIN_SHARE}}
    engines: list[serve.Application] = []
    many: list[int] = []
    if plan.placed is not None:
        placed: Any = serve.deployment(PlacedEngine, name="placed")
        options = {**engine_options, **_placement_options(plan.placed), "num_replicas": plan.placed.replicas}
        if (scale := plan.scale) is not None:
            del options["num_replicas"]
            options["autoscaling_config"] = AutoscalingConfig(
                min_replicas=scale.min,
                max_replicas=scale.max,
                target_ongoing_requests=scale.requests_per_engine,
                upscale_delay_s=scale.upscale_delay_s,
                downscale_delay_s=scale.downscale_delay_s,
            )
        engines.append(placed.options(**options).bind(plan.engine, plan.placed))
        many.append(plan.scale.max if plan.scale is not None else plan.placed.replicas)
    if plan.attached:
        attached: Any = serve.deployment(AttachedEngine, name="attached")
        options = {**engine_options, "num_replicas": len(plan.attached), "ray_actor_options": at_head}
        engines.append(attached.options(**options).bind(plan.attached, plan.engine.keys))
        many.append(len(plan.attached))
    ingress: Any = serve.deployment(Ingress, name="ingress")
    where: dict[str, Any] = {"ray_actor_options": at_head}
    if plan.ingress.count > 1:  # one per host, because they share a port
        where = {"ray_actor_options": {"num_cpus": 0}, "max_replicas_per_node": 1}
    return ingress.options(num_replicas=plan.ingress.count, **where, **health_options).bind(
        plan.ingress, plan.engine, engines, many
    )


def app(arguments: dict[str, str]) -> serve.Application:
    """Returns the application of the plan in the file that the argument `plan` names."""
    return application(read_plan(Path(arguments["plan"])))


def deploy(plan: FleetPlan, name: str = APP_NAME) -> None:
    """Deploys the plan on the connected Ray. Returns once Ray Serve has accepted it."""
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(plan), name=name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


def _placement_options(placed: Placed) -> dict[str, Any]:
    """Returns the resources of an engine, and a placement group if its drafter has its own host."""
    own = placed.bundle().as_ray() or {"CPU": MIN_SHARE}
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {named[name]: many for name, many in own.items() if name in named}
    options["resources"] = {name: many for name, many in own.items() if name not in named}
    found: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0, **options}}
    if placed.drafter.on == "other-host":
        bundles = [own, placed.drafter.needs.as_ray() or {"CPU": MIN_SHARE}]
        found |= {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
    return found


@contextmanager
def connect_to_ray(address: str) -> Iterator[None]:
    """Connects this process to Ray. Raises OutriderError if the head does not answer or rejects it."""
    FleetHead(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError) as error:
        raise EndpointError(f"the head at {address} does not answer ({first_line(error)})") from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def launch(plan: FleetPlan, address: str, show: Callable[[str], None], wait: float) -> list[str]:
    """Deploys the plan, and returns the ingresses' URLs when everything runs.

    Raises:
        OutriderError: it can't run, or is not complete after `wait` seconds.
    """
    show("connecting to the head")
    if plan.engine.model is not None:
        find_model(plan.engine.model, weights=False)  # the ingress tokenizes with it, and starts on this host
    head = FleetHead(address)
    if plan.placed is not None:
        check_fits(plan.placed, [node.offers for node in head.nodes() if node.alive])
    head.store_models([name for name in (plan.engine.model, plan.engine.draft_model) if name and plan.placed])
    with connect_to_ray(address):
        if APP_NAME not in serve.status().applications:
            HttpListener(plan.ingress, "ingress.host, ingress.port").close()  # raises EndpointError if it can't listen
        show("deploying the fleet on Ray")
        deploy(plan)
        _wait_until_running(show, wait)
        return ingress_urls()


def shut_down(address: str) -> None:
    """Shuts down the engines and the ingresses."""
    with connect_to_ray(address):
        serve.shutdown()


def ingress_urls() -> list[str]:
    """Returns the URLs of the ingresses that answer."""
    return sorted(set(collect("ingress", "url")))


def collect(deployment: str, method: str, app_name: str = APP_NAME) -> list[Any]:
    """Calls a method of all replicas, and returns the results of those that answer."""
    found: list[Any] = []
    with suppress(RayError, RayServeException, TimeoutError):
        replies = serve.get_deployment_handle(deployment, app_name).broadcast(method)
        found = replies.results(timeout_s=ANSWER_TIMEOUT_SECONDS, return_exceptions=True)
    return [result for result in found if not isinstance(result, Exception)]


def _wait_until_running(show: Callable[[str], None], wait: float) -> None:
    until = time.monotonic() + wait
    while True:
        found = serve.status().applications.get(APP_NAME)
        if found is not None:
            if found.status == "RUNNING":
                return
            if found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                message = "\n".join([found.message, *(part.message for part in found.deployments.values())])
                sentence = f"the fleet can't start: {first_line(WorkerError(message))}; expected another fleet.yaml"
                raise find_error(message) or WorkerError(sentence)
            show(describe_progress(found))
        if time.monotonic() > until:
            how_far = describe_progress(found) if found is not None else "nothing is"
            raise WorkerError(
                f"the fleet is not complete after {wait:g} s ({how_far}); it continues to start, and"
                " `outrider fleet status` shows its progress"
            )
        time.sleep(POLL_SECONDS)


def describe_progress(found: ApplicationStatusOverview) -> str:
    """Describes the state of each deployment."""
    parts = []
    for name, part in sorted(found.deployments.items()):
        states = [f"{many} {str(state).lower()}" for state, many in sorted(part.replica_states.items()) if many]
        parts.append(f"{name}: {', '.join(states) or 'none yet'}")
    return ", ".join(parts) or "Ray is preparing"


def find_error(message: str) -> OutriderError | None:
    """Returns the last Outrider error quoted in a message from Ray; None if there is none."""
    lines = re.findall(r"(?:outrider\.protocol\.errors\.|\()(\w+)(?:: |\()(.*)", message)
    for name, sentence in reversed(lines):
        if (kind := find_class(name)) is not None:
            return kind(sentence)
    return None


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine. `running` and `waiting` are requests; `tokens` were generated since its start."""

    kind: str
    endpoint: str
    running: int
    waiting: int
    finished: int
    failed: int
    tokens: int
    drafters: str


@dataclass(frozen=True, slots=True)
class PartRow:
    """A deployment: `running` of `wanted` replicas run."""

    name: str
    state: str
    running: int
    wanted: int
    message: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The fleet. `state` is Ray Serve's; empty if nothing runs."""

    hosts: tuple[RayNode, ...]
    state: str = ""
    engines: tuple[EngineRow, ...] = ()
    parts: tuple[PartRow, ...] = ()
    ingresses: tuple[str, ...] = ()


def get_overview(address: str) -> Overview:
    """Returns the state of the fleet with this head. Raises OutriderError if the head does not answer."""
    hosts = tuple(sorted(FleetHead(address).nodes(), key=lambda node: node.name))
    with connect_to_ray(address):
        found = serve.status().applications.get(APP_NAME)
        if found is None:
            return Overview(hosts)
        kinds = [kind for kind in ENGINE_KINDS if kind in found.deployments]
        engines = tuple(_engine_row(kind, *report) for kind in kinds for report in collect(kind, "report"))
        parts = []
        for name, part in sorted(found.deployments.items()):
            running, wanted = part.replica_states.get("RUNNING", 0), sum(part.replica_states.values())
            why = find_error(part.message) or first_line(WorkerError(part.message)) if part.message else ""
            parts.append(PartRow(name, str(part.status.value).lower(), running, wanted, str(why)))
        return Overview(hosts, str(found.status.value), engines, tuple(parts), tuple(ingress_urls()))


def _engine_row(kind: str, place: EngineAddress, stats: Stats) -> EngineRow:
    drafters = [f"{worker.name} {worker.state}" for worker in stats.workers if worker.role == "draft"]
    counts = stats.active, stats.queued, stats.finished, stats.failed, stats.generated
    return EngineRow(kind, place.endpoint, *counts, ", ".join(drafters) or "none")
