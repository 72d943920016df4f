"""A paced worker's forwards end at the times of the profile's machine; late work is reported."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from outrider.engine.verify import VerifyInput
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.messages import DraftTokens
from outrider.target_worker.model_runner import ForwardPart, InFlightForward
from tools.latency import Latency
from tools.simulation.pace import Pace, sleep_precisely
from tools.simulation.paced_runner import PacedRunner
from tools.simulation.profile import TIMES_NOT_KEPT

LATENCY = Latency(((1, 10.0), (5, 14.0)))


class Clock:
    """A clock in seconds that advances only when a test changes `now` or `sleep` is called."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reports():
    return []


@pytest.fixture
def pace(clock, reports):
    return Pace(LATENCY, clock.sleep, clock, reports.append)


def test_forward_takes_the_time_of_the_profile(clock, pace):
    ready = clock.now
    clock.now += 0.004
    pace.end(3, ready)
    pace.wait()
    assert clock.now == pytest.approx(100.012)
    assert clock.sleeps == [pytest.approx(0.008)]


def test_forwards_in_a_row_take_the_sum_of_their_times(clock, pace):
    for rows in (1, 5):
        ready = clock.now
        clock.now += 0.001
        pace.end(rows, ready)
    pace.wait()
    assert clock.now == pytest.approx(100.024)


def test_host_work_between_two_forwards_counts_to_the_second(clock, pace):
    received_at = clock.now
    for _ in range(3):
        clock.now += 0.001
        pace.end(1, received_at)
        pace.wait()
    assert clock.now == pytest.approx(100.030)


def test_idle_time_before_a_forward_is_not_made_up_for(clock, pace):
    pace.end(1, clock.now)
    pace.wait()
    clock.now += 1.0
    pace.end(1, clock.now)
    pace.wait()
    assert clock.now == pytest.approx(101.020)


def test_wait_without_a_forward_takes_no_time(clock, pace):
    pace.wait()
    assert clock.sleeps == []


def run_late(clock, pace, seconds, count):
    for _ in range(count):
        ready = clock.now
        clock.now += 0.010 + seconds
        pace.end(1, ready)
        pace.wait()


def test_forwards_slower_than_the_profile_are_reported_each_time(clock, pace, reports):
    run_late(clock, pace, 0.003, 8)
    (report,) = reports
    assert report.startswith(TIMES_NOT_KEPT) and "forwards ended 24 ms late in 80 ms" in report
    run_late(clock, pace, 0.003, 8)
    assert len(reports) == 2


def test_occasional_late_forwards_are_not_reported(clock, pace, reports):
    run_late(clock, pace, 0.015, 1)
    run_late(clock, pace, -0.005, 300)
    run_late(clock, pace, 0.015, 1)
    assert not reports
    run_late(clock, pace, 0.015, 9)
    assert reports


def test_forwards_slightly_slower_than_the_profile_are_reported_eventually(clock, pace, reports):
    run_late(clock, pace, 0.0005, 120)
    assert reports


def test_sleep_never_ends_early():
    for seconds in (0.0, 0.00005, 0.0015):
        began = time.perf_counter()
        sleep_precisely(seconds)
        assert time.perf_counter() - began >= seconds


def test_forward_without_a_verify_begins_when_the_previous_one_ended(clock, pace, reports):
    """As after a prompt, whose forwards are not paced, when the target continues by itself."""
    runner = PacedRunner(pace)
    runner._ended_ns = int(clock.now * SECOND_NS)
    member = SimpleNamespace(answers=[SimpleNamespace(next_proposal=DraftTokens())])
    forward = SimpleNamespace(commit=lambda: [None])
    clock.now += 0.004
    parts = (ForwardPart(member, VerifyInput(None), 0),)  # type: ignore[arg-type]
    runner.commit(InFlightForward(forward, parts, int(clock.now * SECOND_NS)))
    assert clock.now == pytest.approx(100.010) and not reports
