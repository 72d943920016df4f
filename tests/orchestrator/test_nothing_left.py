"""An ended request leaves nothing behind: state after many requests equals that after few."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from outrider.orchestrator.sockets import MIN_PEERS_TO_FORGET
from outrider.protocol.sampling import SamplingParams
from tests.orchestrator.cluster_in_process import Cluster
from tests.orchestrator.scripted_server import ScriptedServer, generates
from tools.simulation.replay import Script

pytestmark = pytest.mark.usefixtures("counted_clock")

TEXT = tuple(range(1000, 1100))


def objects() -> Counter[str]:
    """Counts the live objects of each of Outrider's classes."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("outrider"))


def left_by(ask: Callable[[int], object], many: int) -> dict[str, int]:
    """Returns the classes of which each of `many` requests leaves at least one object."""
    found = []
    for first in (0, many):
        for number in range(first, first + many):
            ask(number)
        found.append(objects())
    return {kind: count for kind, count in (found[1] - found[0]).items() if count >= many}


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_ended_requests_leave_no_objects_in_scheduler_and_drafter(mode: str) -> None:
    cluster = Cluster(TEXT, Script((TEXT,), (0.7,), (1.0,), 4096))

    def ask(number: int) -> None:
        cluster.run(TEXT[:10], 12, mode, request=f"r{number}")
        for sent in (cluster.events, cluster.sent_to_target, cluster.sent_to_drafters, cluster.target.verified):
            sent.clear()

    assert not left_by(ask, 30)


def test_ended_requests_leave_no_objects_in_the_front(server: ScriptedServer) -> None:
    server.core.on_admit = generates(server.codec, "return 1")

    def ask(_number: int) -> None:
        server.client().generate("def f(", SamplingParams(seed=7))
        server.core.received.clear()

    assert not left_by(ask, MIN_PEERS_TO_FORGET)
