"""The fan-out spends its budget exactly, and on likely outcomes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.fan_out import FAN_OUT_POLICIES, MAX_RANK, Calibration, ForkPoint, best_first, geometric

GAPS = tuple(0.4 * rank for rank in range(12))


def points(chain: int, own_gap: float = 1.0) -> list[ForkPoint | None]:
    return [*(ForkPoint(own_gap, GAPS) for _ in range(chain)), ForkPoint(None, GAPS)]


def calibrated(acceptance: float, rank: int, rounds: int = 600, chain: int = 4) -> Calibration:
    """A calibration that has seen rounds with this acceptance, in which the bonus token always has this rank."""
    calibration = Calibration()
    for index in range(rounds):
        accepted = 0
        while accepted < chain and ((index * 7919 + accepted * 104729) % 1000) / 1000 < acceptance:
            accepted += 1
        seen = [point for point in points(chain)[: accepted + 1] if point is not None]
        calibration.learn(seen, chain, accepted, rank)
    return calibration


@given(st.integers(0, 12), st.integers(1, 64), st.sampled_from(sorted(FAN_OUT_POLICIES)))
def test_the_budget_is_spent_exactly(chain_length: int, budget: int, policy: str) -> None:
    counts = FAN_OUT_POLICIES[policy]([None] * (chain_length + 1), budget, Calibration())
    assert len(counts) == chain_length + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


def test_geometric_gives_more_to_the_full_acceptance() -> None:
    """Theorem 12: without a rejection needed, the last fork point gets more than its neighbour."""
    counts = geometric([None] * 6, 60, calibrated(0.8, 0))
    assert counts[5] > counts[4]
    assert counts[0] >= counts[1] >= counts[2] >= counts[3] >= counts[4]


def test_best_first_begins_at_the_likeliest_outcome() -> None:
    assert best_first(points(4), 1, calibrated(1.0, 0)) == [0, 0, 0, 0, 1]
    assert best_first(points(4), 1, calibrated(0.0, 0)) == [1, 0, 0, 0, 0]


def test_best_first_widens_when_the_bonus_token_ranks_low() -> None:
    shallow, deep = calibrated(0.5, 0), calibrated(0.5, 3)
    assert max(best_first(points(4), 10, deep)) > max(best_first(points(4), 10, shallow))


def test_best_first_prefers_points_where_the_drafter_is_unsure() -> None:
    unsure = [ForkPoint(5.0, GAPS), ForkPoint(0.05, GAPS), ForkPoint(5.0, GAPS), ForkPoint(None, GAPS)]
    counts = best_first(unsure, 8, Calibration())
    assert counts[1] > counts[0]
    assert counts[1] > counts[2]


def test_best_first_asks_for_no_more_candidates_than_there_are() -> None:
    assert best_first([ForkPoint(None, (0.0, 1.0))], 8, Calibration()) == [2]


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_calibration_finds_the_acceptance(rate: float) -> None:
    calibration = calibrated(rate, 1, rounds=3000)
    assert abs(calibration.acceptance(0) - rate) < 0.1
    assert abs(calibration.acceptance(0, 1.0) - rate) < 0.1
    assert calibration.bonus_probability(False, 1) > 0.8
    assert calibration.bonus_probability(False, MAX_RANK - 1) < 0.05


def test_tokens_that_are_never_verified_are_still_judged() -> None:
    """The target's own token after a truncated chain shows whether the chain's next token would have been accepted."""
    unsure, end = ForkPoint(0.3, (0.0, 0.3)), ForkPoint(None, (0.0, 0.3))
    calibration = Calibration()
    for _ in range(300):
        calibration.learn([unsure], 1, 0, None)
    assert calibration.acceptance(0, 0.3) < 0.1
    for _ in range(300):
        calibration.learn([end], 0, 0, 0)
    assert calibration.acceptance(0, 0.3) > 0.4


def test_copied_tokens_are_judged_apart_from_the_drafter_s_own() -> None:
    """A chain's token that is not the drafter's best is a copy; its acceptance tells nothing about near ties."""
    calibration, before = Calibration(), Calibration().acceptance(0, 0.1)
    for _ in range(300):
        calibration.learn([ForkPoint(-2.0, (0.0, 1.0)), ForkPoint(None, (0.0, 0.1))], 1, 1, None)
    assert calibration.acceptance(0, -2.0) > 0.9
    assert calibration.acceptance(0, 0.1) < before


def test_unseen_gap_keeps_its_prior() -> None:
    """A rank that always wins at one gap says nothing about another gap."""
    calibration = calibrated(0.0, 1)
    near, far = ForkPoint(1.0, (0.0, 0.4)), ForkPoint(1.0, (0.0, 8.0))
    assert calibration.bonus_probability(False, 1, near) > 0.9
    assert calibration.bonus_probability(False, 1, far) < 0.05


def test_best_first_skips_points_without_candidates() -> None:
    """Top-p or top-k may leave nothing but the chain's own token."""
    assert best_first([ForkPoint(1.0, ()), ForkPoint(None, GAPS)], 5, Calibration()) == [0, 5]
    assert best_first([ForkPoint(None, ())], 5, Calibration()) == [0]
