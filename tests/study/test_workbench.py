"""A bench that pauses between its measurements does not take its own silence for its workers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from outrider.orchestrator.core.worker_pool import Loss, WorkerPool
from outrider.orchestrator.study.workbench import Workbench
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Message, Outcome, Pong

NAMES = ("target-0", "draft-0")


class Silent:
    """A pool whose workers were not listened to for long: they count as lost until each has answered a ping."""

    def __init__(self, answers: tuple[str, ...]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind("inproc://silent-" + str(id(self)))
        self._answers = list(answers)
        self._asked = False
        self.heard: set[str] = set()

    def drafters(self) -> set[str]:
        return {"draft-0"}

    def ping(self, now_ns: int) -> None:
        self._asked = True

    def receive(self) -> Iterator[tuple[str, Message]]:
        if self._asked and self._answers:
            name = self._answers.pop(0)
            yield name, Pong(name, 1, 1)

    def pong(self, name: str, message: Pong, now_ns: int) -> None:
        self.heard.add(name)

    def losses(self, now_ns: int) -> list[Any]:
        lost = set(NAMES) - self.heard
        return [Loss(cast("Any", None), f"{sorted(lost)} have not answered", True)] if lost else []

    def send_target(self, message: Message) -> None: ...


def test_it_hears_from_all_before_it_goes_on() -> None:
    pool = Silent(NAMES)
    bench = Workbench(cast("WorkerPool", pool), lambda stage: None)
    bench.rouse()
    assert pool.heard == set(NAMES)
    assert pool.losses(0) == []


def test_one_that_stays_silent_is_told_by_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.orchestrator.study.workbench.ROUSE_MS", 10)
    bench = Workbench(cast("WorkerPool", Silent(("draft-0",))), lambda stage: None)
    bench.rouse()
    with pytest.raises(WorkerError, match=r"'target-0'. have not answered"):
        bench._wait(Outcome)
