"""The cost of a forward by rows never falls with more rows, and is linear between measured points."""

from __future__ import annotations

import random

import pytest

from outrider.orchestrator.core.policy.estimates import RowCosts


def learned(*seen: tuple[int, float]) -> RowCosts:
    costs = RowCosts()
    for rows, milliseconds in seen:
        costs.add(rows, milliseconds)
    return costs


def test_nothing_seen_is_nothing_known() -> None:
    assert RowCosts()(4) is None


def test_it_goes_through_what_was_seen_and_straight_in_between() -> None:
    costs = learned((1, 10.0), (4, 13.0), (8, 21.0))
    assert [costs(rows) for rows in (1, 2, 4, 6, 8)] == [10.0, 11.0, 13.0, 17.0, 21.0]


def test_beyond_what_was_seen_it_goes_on_rising() -> None:
    costs = learned((4, 13.0))
    below, at, above = (costs(rows) or 0.0 for rows in (1, 4, 64))
    assert 0 < below < at < above


@pytest.mark.parametrize("seed", range(5))
def test_more_rows_never_take_less(seed: int) -> None:
    rng = random.Random(seed)
    costs = RowCosts()
    for _ in range(200):
        rows = rng.choice((1, 2, 5, 9, 16, 17, 30, 64, 200, 900))
        costs.add(rows, (10.0 + 0.6 * rows) * rng.choice((0.5, 1.0, 1.0, 3.0)))
        curve = [costs(count) or 0.0 for count in range(1, 300)]
        assert curve == sorted(curve)


def test_a_machine_that_got_busy_is_believed() -> None:
    costs = learned(*[(4, 10.0)] * 50, *[(4, 20.0)] * 50)
    assert costs(4) == pytest.approx(20.0, rel=0.05)


def test_an_old_time_gives_way_to_new_ones_that_contradict_it() -> None:
    costs = learned(*[(8, 40.0)] * 5, *[(16, 20.0), (4, 12.0)] * 200)
    assert (costs(8) or 0.0) <= 1.2 * 20.0
