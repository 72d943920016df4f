"""A workbench runs rounds over a known text, waits for its workers, and stops when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.core.worker_registry import WorkerLoss
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Fault, Message, Outcome
from outrider.protocol.sampling import SamplingParams
from tools import workbench
from tools.workbench import WARM_UP_ROUNDS, Workbench


class FakePool:
    """A pool that receives the given messages, and reports the loss of a worker with the given reason."""

    status_changed = False

    def __init__(self, messages: tuple[Message, ...] = (), loss: str = "") -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind("inproc://silent-" + str(id(self)))
        self._messages, self._loss = messages, loss

    def receive(self) -> Iterator[tuple[str, Message]]:
        return (("target-0", message) for message in self._messages)

    def flush(self) -> None: ...

    def ping(self, now_ns: int) -> None: ...

    def losses(self, now_ns: int) -> list[Any]:
        return [WorkerLoss(cast("Any", None), self._loss, True)] if self._loss else []


def test_rounds_verify_the_text_itself_and_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, opened = Workbench(cast("WorkerPool", FakePool()), lambda stage: None), list[tuple[Any, ...]]()
    monkeypatch.setattr(Workbench, "open", lambda _, tokens, sampling, **to: opened.append((tokens, to)))
    monkeypatch.setattr(Workbench, "close", lambda _: opened.append(()))
    text = tuple(range(100, 120))
    found = bench.rounds((3, text), SamplingParams(), 2, 2, lambda at: at, target=False)
    assert opened == [(text[:3], {"target": False, "drafter": True}), ()]
    assert WARM_UP_ROUNDS == 2 and [(at.number, at.base_len) for at in found] == [(3, 10), (4, 13)]
    assert [(at.new, at.chain) for at in found] == [((107, 108, 109), (110, 111)), ((110, 111, 112), (113, 114))]


def test_workbench_without_a_drafter_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = ["no draft model: it can't draft"]
    pool = SimpleNamespace(start=lambda: None, stats=lambda: (), close=lambda: None, drafters=set, notes=lambda: notes)
    monkeypatch.setattr(workbench, "WorkerPool", lambda *_: pool)
    monkeypatch.setattr(workbench, "is_serving", lambda stats: True)
    with pytest.raises(WorkerError, match="nothing can be drafted: no draft model: it can't draft"):  # noqa: SIM117
        with workbench.workbench(ServeSettings(), lambda stage: None):
            pytest.fail("there is nothing to time")


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (FakePool(loss="target-0 has not answered"), "target-0 has not answered"),
        (FakePool(messages=(Fault("bench", "out of memory"),)), "out of memory"),
    ],
)
def test_workbench_wait_ends_when_its_worker_fails(pool: FakePool, words: str) -> None:
    bench = Workbench(cast("WorkerPool", pool), lambda stage: None)
    with pytest.raises(WorkerError, match=words):
        bench.wait(Outcome)
