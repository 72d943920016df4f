"""The fan-out spends its budget exactly, and spends it where outcomes are likely."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_worker.calibration import MAX_RANK, Calibration
from draft_worker.fan_out import POLICIES, best_first, geometric


def calibrated(acceptance: float, rank: int, rounds: int = 400, chain: int = 4) -> Calibration:
    calibration = Calibration()
    for index in range(rounds):
        accepted = 0
        while accepted < chain and ((index * 7919 + accepted * 104729) % 1000) / 1000 < acceptance:
            accepted += 1
        calibration.learn(chain, accepted, rank)
    return calibration


@given(st.integers(0, 12), st.integers(1, 64), st.sampled_from(sorted(POLICIES)))
def test_the_budget_is_spent_exactly(chain_length: int, budget: int, policy: str) -> None:
    counts = POLICIES[policy](chain_length, budget, Calibration())
    assert len(counts) == chain_length + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


def test_geometric_lifts_the_full_acceptance() -> None:
    """Theorem 12: without a rejection needed, the last fork point gets more than its neighbour."""
    counts = geometric(5, 60, calibrated(0.8, 0))
    assert counts[5] > counts[4]
    assert counts[0] >= counts[1] >= counts[2] >= counts[3] >= counts[4]


def test_best_first_begins_where_the_text_goes() -> None:
    assert best_first(4, 1, calibrated(1.0, 0)) == [0, 0, 0, 0, 1]
    assert best_first(4, 1, calibrated(0.0, 0)) == [1, 0, 0, 0, 0]


def test_best_first_widens_where_the_bonus_stands_deep() -> None:
    shallow, deep = calibrated(0.5, 0), calibrated(0.5, 3)
    assert max(best_first(4, 10, deep)) > max(best_first(4, 10, shallow))


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_calibration_finds_the_acceptance(rate: float) -> None:
    calibration = calibrated(rate, 1, rounds=3000)
    assert abs(calibration.acceptance(0) - rate) < 0.1
    assert calibration.rank_share(False, 1) > 0.8
    assert calibration.rank_share(False, MAX_RANK - 1) < 0.05
