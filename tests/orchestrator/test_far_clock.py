"""Times of another machine are converted to this machine's clock, as exactly as the fastest heartbeat allows."""

from __future__ import annotations

import random

import pytest

from outrider.orchestrator.core.worker_registry import RemoteClock
from outrider.protocol.clock import MILLISECOND_NS, SECOND_NS
from outrider.protocol.messages import Branches, Resync, Span

HOUR_NS = 3600 * SECOND_NS
MAX_CLOCK_DRIFT_RATIO = 200e-6  # of two quartz clocks


class RemoteMachine:
    """A machine whose clock is `ahead_ns` ahead when the local clock is 0, and drifts."""

    def __init__(self, ahead_ns: int, drift: float = 0.0, seed: int = 0) -> None:
        self.ahead_ns, self.drift, self.now_ns = ahead_ns, drift, 100 * HOUR_NS
        self.clock = RemoteClock()
        self._rng = random.Random(seed)

    def remote_time(self, local_ns: int) -> int:
        return int(local_ns * (1 + self.drift)) + self.ahead_ns

    def heartbeat(self, there_ms: float, back_ms: float, seconds: float = 0.25) -> None:
        asked_ns = self.now_ns
        answered_ns = asked_ns + int(there_ms * MILLISECOND_NS)
        self.now_ns = answered_ns + int(back_ms * MILLISECOND_NS)
        self.clock.observe(asked_ns, self.remote_time(answered_ns), self.now_ns)
        self.now_ns += int(seconds * SECOND_NS)

    def error_ns(self) -> int:
        """Returns the error of the converted end of a span that ends now."""
        converted = self.clock.to_local(Branches("r", 0, 0, 1, (), Span(0, self.remote_time(self.now_ns))), self.now_ns)
        assert isinstance(converted, Branches)
        return abs(converted.work.ended_ns - self.now_ns)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ahead_ns", [-50 * HOUR_NS, -SECOND_NS, 30 * MILLISECOND_NS, 5000 * HOUR_NS])
def test_offset_error_is_at_most_half_the_shortest_round_trip(ahead_ns: int, seed: int) -> None:
    rng, remote = random.Random(seed), RemoteMachine(ahead_ns)
    shortest = 1e9
    for _ in range(40):
        there, back = 1 + rng.expovariate(0.2), 1 + rng.expovariate(0.2)
        remote.heartbeat(there, back)
        shortest = min(shortest, there + back)
        assert remote.error_ns() <= (shortest / 2 + 10 * MAX_CLOCK_DRIFT_RATIO * 1000) * MILLISECOND_NS + 10


@pytest.mark.parametrize("drift", [-0.9 * MAX_CLOCK_DRIFT_RATIO, 0.9 * MAX_CLOCK_DRIFT_RATIO])
def test_drifting_clock_is_followed(drift: float) -> None:
    remote = RemoteMachine(HOUR_NS, drift)
    remote.heartbeat(0.1, 0.1)
    for _ in range(4000):  # about 17 minutes with slower answers
        remote.heartbeat(3.0, 3.0)
        assert remote.error_ns() <= 10 * MILLISECOND_NS


@pytest.mark.parametrize("jump_ns", [-2 * HOUR_NS, -SECOND_NS, SECOND_NS, 3 * HOUR_NS])
def test_clock_jump_is_followed_at_the_next_heartbeat(jump_ns: int) -> None:
    remote = RemoteMachine(HOUR_NS)
    remote.heartbeat(0.1, 0.1)
    remote.ahead_ns += jump_ns
    remote.heartbeat(20.0, 20.0)
    assert remote.error_ns() <= 20 * MILLISECOND_NS


def test_possibly_equal_clock_has_zero_offset() -> None:
    remote = RemoteMachine(0)
    remote.heartbeat(0.1, 4.0)
    assert remote.clock.ahead_ns == 0 and remote.error_ns() == 0


def test_converted_work_ends_by_now_and_keeps_its_duration() -> None:
    clock = RemoteClock()
    for work in (Span(7, 12), Span(5 * HOUR_NS, 5 * HOUR_NS + 5)):
        for _ in range(2):
            converted = clock.to_local(Branches("r", 0, 0, 1, (), work), HOUR_NS)
            assert isinstance(converted, Branches)
            assert 0 <= converted.work.started_ns <= converted.work.ended_ns <= HOUR_NS
            assert converted.work.ended_ns - converted.work.started_ns == 5
            clock.observe(HOUR_NS - 10, HOUR_NS - 5, HOUR_NS)
        clock = RemoteClock()


def test_messages_without_times_are_unchanged() -> None:
    assert RemoteClock().to_local(Resync("r", 0), 5) == Resync("r", 0)
