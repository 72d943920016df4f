"""A drafter reports how long its work should take, so that a hang can be told from work."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.worker import LATENCY_DECAY, DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.protocol.messages import Commit, Open
from outrider.protocol.sampling import SamplingParams
from tests.system.links import FakeLink, VirtualClock, run_worker
from tools.simulation.replay import ReplayDrafter, Script

FORWARD_MS, CHAIN = 40, 3
TEXT = tuple(range(60))


class RecordingLink(FakeLink):
    """Records the announced times."""

    def __init__(self) -> None:
        super().__init__("draft-0", deque())
        self.announced: list[float] = []

    def expect(self, milliseconds: float) -> None:
        self.announced.append(milliseconds)


def test_expected_time_is_the_longest_seen_and_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    now, link = [0], RecordingLink()
    monkeypatch.setattr("outrider.protocol.clock.now", lambda: now[0])
    worker = DraftWorker(link, ReplayDrafter(Script((TEXT,), (0.9,), (0.5,), 100)), FAN_OUT_POLICIES["best-first"])
    for milliseconds in (10, 50, 10, 10, 0):
        with worker._timed("grow"):
            now[0] += milliseconds * 1_000_000
    with worker._timed("read"):
        pass
    assert link.announced[:3] == [0, 10, 50] and link.announced[-1] == 0, "it has never read"
    assert link.announced[4] == pytest.approx(50 * LATENCY_DECAY**2)


def test_each_operation_announces_its_expected_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)

    class SlowDrafter:
        def __init__(self) -> None:
            self._inner = ReplayDrafter(Script((TEXT,), (0.9,), (0.5,), 100))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def open(self, tokens: Any, sampling: Any, *_: Any) -> Any:
            tree: Any = self._inner.open(tokens[:1], sampling)
            feed, read = tree.feed, tree.read

            def feed_slowly(*fed: Any) -> Any:
                clock.skip(FORWARD_MS * 1_000_000)
                return feed(*fed)

            def read_slowly(unread: Any) -> Any:
                clock.skip(100 * 1_000_000)
                tree.feed = feed
                done = read(unread[:20])
                tree.feed = feed_slowly
                return done

            tree.read = read_slowly
            return tree

    link = RecordingLink()
    announced = link.announced
    worker = DraftWorker(link, SlowDrafter(), FAN_OUT_POLICIES["best-first"])  # type: ignore[arg-type]
    opened = Open("r", 0, 0, np.array(TEXT[:50], np.int32), SamplingParams())
    run_worker(worker, link, [opened, Commit("r", 0, 0, 50, (), (), 2, 4)])
    first, piece, grown = announced[:3]
    assert first == grown == 0 and 100 <= piece < 120
    assert len(announced) > 3 and all(FORWARD_MS - 5 <= expected < 60 for expected in announced[3:])
    announced.clear()
    for round_ in (1, 2):
        run_worker(worker, link, [Commit("r", 0, round_, 50, (), None, CHAIN, 0)])
    assert announced[0] == 0 and (CHAIN - 1) * FORWARD_MS <= announced[1] < 100
