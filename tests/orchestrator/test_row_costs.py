"""The cost of a forward by rows never falls with more rows, and is linear between measured points."""

from __future__ import annotations

import random

import pytest

from outrider.orchestrator.core.policy.estimates import Estimates, RowCosts


def make_costs(*seen: tuple[int, float]) -> RowCosts:
    costs = RowCosts()
    for rows, milliseconds in seen:
        costs.add(rows, milliseconds)
    return costs


def test_cost_is_unknown_without_samples() -> None:
    assert RowCosts()(4) is None


def test_cost_is_linear_between_samples() -> None:
    costs = make_costs((1, 10.0), (4, 13.0), (8, 21.0))
    assert [costs(rows) for rows in (1, 2, 4, 6, 8)] == [10.0, 11.0, 13.0, 17.0, 21.0]


def test_cost_rises_beyond_the_samples() -> None:
    costs = make_costs((4, 13.0))
    below, at, above = (costs(rows) or 0.0 for rows in (1, 4, 64))
    assert 0 < below < at < above


@pytest.mark.parametrize("seed", range(5))
def test_cost_never_falls_with_more_rows(seed: int) -> None:
    rng = random.Random(seed)
    costs = RowCosts()
    for _ in range(200):
        rows = rng.choice((1, 2, 5, 9, 16, 17, 30, 64, 200, 900))
        costs.add(rows, (10.0 + 0.6 * rows) * rng.choice((0.5, 1.0, 1.0, 3.0)))
        curve = [costs(count) or 0.0 for count in range(1, 300)]
        assert curve == sorted(curve)


def test_cost_follows_a_machine_that_became_slower() -> None:
    costs = make_costs(*[(4, 10.0)] * 50, *[(4, 20.0)] * 50)
    assert costs(4) == pytest.approx(20.0, rel=0.05)


def test_old_sample_yields_to_contradicting_new_ones() -> None:
    costs = make_costs(*[(8, 40.0)] * 5, *[(16, 20.0), (4, 12.0)] * 200)
    assert (costs(8) or 0.0) <= 1.2 * 20.0


def test_row_costs_are_the_measured_ones_in_tokens() -> None:
    found = Estimates()
    for _ in range(50):
        found.observe_round(1, 10.0)
        for rows, milliseconds in ((1, 10.0), (2, 11.0), (3, 15.0)):
            found.observe_verify(rows, milliseconds)
    assert found.row_costs(2) == pytest.approx([0.0, 0.1, 0.5], abs=0.05)


def test_disturbed_measurement_does_not_keep_rows_from_being_measured_again() -> None:
    """After the measurement only plain rounds are run, because more rows seem to cost too much."""
    found = Estimates()
    found.observe_round(1, 10.0)
    found.observe_verify(1, 10.0)
    found.observe_verify(2, 90.0)
    assert found.row_costs(1)[1] > 2
    for _ in range(400):
        found.observe_verify(1, 10.0)
    assert found.row_costs(1)[1] < 0.3


def test_rows_not_measured_for_very_long_still_have_a_cost() -> None:
    """As in a server that ran many requests at once, and then a single one for an hour."""
    costs = make_costs((40, 20.0), (48, 19.0))
    for _ in range(100_000):
        costs.add(5, 10.0)
    assert costs(40) == costs(48) == pytest.approx(19.5)
