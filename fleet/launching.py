"""A plan brought up on the Ray of this host, and ended: from a command's own process, which Ray Serve outlives."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatusOverview

from outrider.fleet import application
from outrider.fleet.membership import FleetHead
from outrider.fleet.plan import FleetPlan, check_fits
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.orchestrator.pairing.model_files import find_model
from outrider.protocol import errors
from outrider.protocol.errors import EndpointError, OutriderError, WorkerError

NAME = "outrider"
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 10.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process is one that Ray knows. Raises OutriderError: the head does not answer, or not to it."""
    FleetHead(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError) as error:
        raise EndpointError(f"the head at {address} can't be asked ({first_line(str(error))})") from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def launch(plan: FleetPlan, address: str, told: Callable[[str], None], wait: float) -> list[str]:
    """Has the plan run; where its gates are, when all are there.

    Raises:
        OutriderError: it can't run, or is not complete after so many seconds.
    """
    told("asking the head")
    if plan.model is not None:
        find_model(plan.model, weights=False)  # the gate reads texts with it, and begins on this host
    head = FleetHead(address)
    if plan.placed is not None:
        check_fits(plan.placed, [node.resources for node in head.nodes() if node.alive])
    head.tell_models([name for name in (plan.model, plan.draft_model) if name and plan.placed])
    with connected(address):
        if NAME not in serve.status().applications:
            _check_ingress(plan.gate.http)
        told("telling Ray what is to run")
        application.run(plan, NAME)
        _wait_until_there(told, wait)
        return gate_urls()


def shut_down(address: str) -> None:
    """Ends the engines and the gates, in order."""
    with connected(address):
        serve.shutdown()


def gate_urls() -> list[str]:
    """Where the gates are."""
    found = serve.get_deployment_handle("gate", NAME).broadcast("url").results(timeout_s=ANSWER_SECONDS)
    return sorted(set(map(str, found)))


def _wait_until_there(told: Callable[[str], None], wait: float) -> None:
    until = time.monotonic() + wait
    while True:
        found = serve.status().applications.get(NAME)
        if found is not None:
            if found.status == "RUNNING":
                return
            if found.status in ("DEPLOY_FAILED", "UNHEALTHY") and (why := _why(found)):
                raise why
            told(progress(found))
        if time.monotonic() > until:
            how_far = progress(found) if found is not None else "nothing is"
            raise WorkerError(
                f"not all of the fleet is there after {wait:g} s ({how_far}); it goes on starting, and"
                " `outrider fleet status` tells how far it is"
            )
        time.sleep(LOOK_SECONDS)


def progress(found: ApplicationStatusOverview) -> str:
    """How many of each part are there."""
    parts = [f"{name}: {states(part.replica_states)}" for name, part in sorted(found.deployments.items())]
    return ", ".join(parts) or "Ray is preparing"


def states(replicas: dict[str, int]) -> str:
    """Ray's words for replicas, in small letters."""
    return ", ".join(f"{many} {str(state).lower()}" for state, many in sorted(replicas.items()) if many) or "none yet"


def _why(found: ApplicationStatusOverview) -> OutriderError | None:
    """The sentence that ended an actor's start, by its own class; None: Serve tries again."""
    said = "\n".join([found.message, *(part.message for part in found.deployments.values())])
    sentence = sentence_in(said)
    return sentence or WorkerError(f"the fleet can't start: {first_line(said)}; expected another fleet.yaml")


def sentence_in(said: str) -> OutriderError | None:
    """The last error of Outrider's own that Ray's words tell of."""
    lines = re.findall(r"(?:outrider\.protocol\.errors\.|\()(\w+)(?:: |\()(.*)", said)
    for name, sentence in reversed(lines):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, OutriderError):
            return kind(sentence)
    return None


def first_line(said: str) -> str:
    """What a page of Ray's begins with."""
    return next((line.strip() for line in said.splitlines() if line.strip()), "it says nothing")[:300]


def _check_ingress(http: HttpSettings) -> None:
    """Raises EndpointError where the gate of a new fleet could not serve: it begins on this host."""
    try:
        HttpListener(http).close()
    except EndpointError:
        raise EndpointError(
            f"the gate can't be served at {http.host}:{http.port}: something else is there, or the address is none of"
            " this host's; expected another gate.port or gate.host in the file"
        ) from None
