"""A second drafter in virtual time, on machines with round numbers: more hits, and no loss if it lags."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from outrider.protocol.messages import Timings
from tests.bench.virtual_time import Machine, VirtualCluster, random_texts
from tools.latency import Latency
from tools.simulation.profile import Profile

MACHINE = Profile(
    "round numbers", ("none",), Latency(((1, 20.0),)), Latency(((1, 2.0), (17, 5.0))), 0.0, (0.8,), (0.4, 0.2, 0.1, 0.1)
)
NEAR, FAR = Machine(MACHINE), Machine(replace(MACHINE, link_ms=30.0))
HALF = Machine(replace(MACHINE, draft=Latency(((1, 4.0), (17, 10.0)))))
ANOTHER = Machine(MACHINE, seed=7)
DEPTH, TOKENS = 4, 400


@cache
def runs(branches: int, *others: Machine) -> tuple[Timings, ...]:
    texts = random_texts(3, 2 * TOKENS)
    cluster = VirtualCluster(MACHINE, texts, depth=DEPTH, branches=branches, others=others)
    return tuple(cluster.run(text, TOKENS, "ssd") for text in texts)


def hits(timings: tuple[Timings, ...]) -> float:
    found = sum(one.cache_hits for one in timings)
    return found / (found + sum(one.cache_misses for one in timings))


def rate(timings: tuple[Timings, ...]) -> float:
    return sum(one.predicted_n for one in timings) / sum(one.predicted_ms for one in timings)


def test_second_drafter_with_as_many_branches_raises_hit_rate_and_speed() -> None:
    assert hits(runs(16, NEAR)) > hits(runs(8)) + 0.03
    assert rate(runs(16, NEAR)) > 1.02 * rate(runs(8))


def test_two_drafters_are_faster_than_one_overloaded_drafter() -> None:
    assert rate(runs(32, NEAR)) > 1.02 * rate(runs(32))


@pytest.mark.parametrize("other", [FAR, HALF, ANOTHER], ids=["far", "slow", "another model"])
def test_far_slow_or_disagreeing_second_drafter_costs_nothing(other: Machine) -> None:
    assert rate(runs(16, other)) > 0.99 * rate(runs(16))
