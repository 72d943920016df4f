"""The fleet as a person looks at it: hosts, engines, the parts that Ray Serve keeps, and where the gates are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from outrider.fleet.engine_address import EngineAddress
from outrider.fleet.host import LABEL, RAY, Resources
from outrider.fleet.launching import ANSWER_SECONDS, NAME, connected, first_line, gate_urls, sentence_in
from outrider.fleet.membership import FleetHead, RayNode
from outrider.protocol.messages import Stats

KINDS = ("placed", "attached")


@dataclass(frozen=True, slots=True)
class HostRow:
    """`release`: of Outrider there."""

    name: str
    state: str
    offers: str
    release: str


@dataclass(frozen=True, slots=True)
class EngineRow:
    """`running` and `waiting` are requests; `tokens` were generated since its start."""

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
    """Engines of one kind, or the gates: how many are `there` of those that are `wanted`."""

    name: str
    state: str
    there: int
    wanted: int
    message: str


@dataclass(frozen=True, slots=True)
class Overview:
    """`state` is Ray Serve's of the whole; empty: nothing runs."""

    hosts: tuple[HostRow, ...]
    state: str = ""
    engines: tuple[EngineRow, ...] = ()
    parts: tuple[PartRow, ...] = ()
    gates: tuple[str, ...] = ()


def look(address: str) -> Overview:
    """What the fleet at this head is now. Raises OutriderError where the head can't be asked."""
    hosts = tuple(sorted(map(_host, FleetHead(address).nodes()), key=lambda row: row.name))
    with connected(address):
        found = serve.status().applications.get(NAME)
        if found is None:
            return Overview(hosts)
        engines = tuple(row for kind in KINDS if kind in found.deployments for row in _engines(kind))
        gates: list[str] = []
        with suppress(RayError, RayServeException, TimeoutError):
            gates = gate_urls()
        return Overview(hosts, str(found.status.value), engines, _parts(found), tuple(gates))


def _host(node: RayNode) -> HostRow:
    metal, ane, cuda, cpu, memory = (node.resources.get(name, 0) for name in RAY.values())
    offers = Resources(metal, ane, cuda, cpu, int(memory))
    return HostRow(node.name, "there" if node.alive else "gone", str(offers), node.labels.get(LABEL, ""))


def _engines(kind: str) -> list[EngineRow]:
    """Those that answer."""
    try:
        told = serve.get_deployment_handle(kind, NAME).broadcast("report").results(timeout_s=ANSWER_SECONDS)
    except (RayError, RayServeException, TimeoutError):
        return []
    return [_engine(kind, place, stats) for place, stats in told]


def _engine(kind: str, place: EngineAddress, stats: Stats) -> EngineRow:
    drafters = [f"{worker.name} {worker.state}" for worker in stats.workers if worker.role == "draft"]
    return EngineRow(
        kind,
        place.endpoint,
        stats.active,
        stats.queued,
        stats.finished,
        stats.failed,
        stats.generated,
        ", ".join(drafters) or "none",
    )


def _parts(found: ApplicationStatusOverview) -> tuple[PartRow, ...]:
    rows = []
    for name, part in sorted(found.deployments.items()):
        there, wanted = part.replica_states.get("RUNNING", 0), sum(part.replica_states.values())
        why = sentence_in(part.message) or first_line(part.message) if part.message else ""
        rows.append(PartRow(name, str(part.status.value).lower(), there, wanted, str(why)))
    return tuple(rows)
