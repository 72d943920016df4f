"""A drafter reports how long its work should take, so that a hang can be told from work."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.worker import LATENCY_DECAY, DraftWorker, OpLatency
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.protocol.messages import Commit, Open
from outrider.protocol.sampling import SamplingParams
from tests.system.links import FakeLink, VirtualClock, run_worker
from tools.simulation.replay import ReplayDrafter, Script

FORWARD_MS, CHAIN = 40, 3
TEXT = tuple(range(60))


def test_expected_time_is_the_longest_seen_and_fades() -> None:
    usual = OpLatency()
    assert usual.expected_ms("grow") == 0.0
    for milliseconds in (10.0, 50.0, 10.0, 10.0):
        usual.record("grow", milliseconds)
    assert usual.expected_ms("grow") == pytest.approx(50 * LATENCY_DECAY**2)
    assert usual.expected_ms("read") == 0.0, "it has never read"


def test_each_operation_announces_its_expected_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    announced: list[float] = []

    class RecordingLink(FakeLink):
        def expect(self, milliseconds: float) -> None:
            announced.append(round(milliseconds))

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

    link = RecordingLink("draft-0", deque())
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
