"""A target is asked only for what it can do, a draft that can't draft is gone on without, and a note says why."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.events import Began
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.abilities import Abilities
from outrider.protocol.directory import private_directory
from outrider.protocol.messages import Fault, Hello, Verify
from tests.orchestrator.cluster_in_process import Cluster

TEXT = tuple(range(1, 90))
WHY = "a plamo3 model can't verify several tokens at once, so it decodes one by one"


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_a_target_without_chains_decodes_plainly_in_every_mode(mode: str) -> None:
    cluster = Cluster(TEXT, None)
    cluster.target_abilities = Abilities(chains=False, why=WHY)
    cluster.said = [f"speculation is off: {WHY}"]
    ended = cluster.run(TEXT[:5], 40, mode)
    assert cluster.generated == list(TEXT[5:45])
    assert not any(message.chain or message.draft for message in cluster.told_target if isinstance(message, Verify))
    began = next(event for event in cluster.told if isinstance(event, Began))
    assert began.mode == "ar"
    assert [*began.notes, *ended.notes].count(cluster.said[0]) == (0 if mode == "ar" else 2)


def hello(name: str, role: Any, able: Abilities) -> Hello:
    return Hello(role, name, 0, 1, "mlx", "m", 10, 10, 1, 1, abilities=able)


def test_the_cluster_begins_without_a_draft_that_cannot_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_directory() as directory:
        pool = WorkerPool(zmq.Context.instance(), ServeSettings(), directory.path)
        monkeypatch.setattr("outrider.orchestrator.core.worker_pool.spawn_worker", lambda *args: Spawned())
        pool.start()
        pool.hello("target-0", hello("target-0", "target", Abilities()), 0)
        assert not pool.ready
        pool.fault("draft-0", Fault("draft-0", None, "a llama4 model can't draft", dispensable=True))
        assert pool.ready and not pool.drafters() and not pool.losses(0)
        assert pool.notes() == ["no draft model: a llama4 model can't draft"]
        pool.close()


def test_any_other_fault_at_the_start_still_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_directory() as directory:
        pool = WorkerPool(zmq.Context.instance(), ServeSettings(), directory.path)
        monkeypatch.setattr("outrider.orchestrator.core.worker_pool.spawn_worker", lambda *args: Spawned(3))
        pool.start()
        pool.fault("draft-0", Fault("draft-0", None, "no model at /x"))
        assert not pool.ready
        assert {loss.why for loss in pool.losses(0) if loss.worker.role == "draft"} == {"no model at /x"}
        pool.close()


class Spawned:
    """A process that runs, or has ended with `code`."""

    pid = 1

    def __init__(self, code: int | None = None) -> None:
        self._code = code

    def exit_code(self) -> int | None:
        return self._code

    def log_tail(self) -> str:
        return ""

    def terminate(self) -> None: ...

    def wait(self, seconds: float) -> None: ...
