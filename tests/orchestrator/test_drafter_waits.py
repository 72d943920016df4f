"""How long a request waits for its drafter: with other requests, at most their next forward."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.next_round import MAX_FIRST_WAIT_MS, MAX_WAIT_MS, Proposer
from outrider.orchestrator.core.policy.estimates import Estimates

VERIFY_MS = 40.0


def estimates(active: int) -> Estimates:
    """Of a drafter that is busy with a long prompt."""
    found = Estimates()
    found.active = active
    for _ in range(50):
        found.observe_verify(8, VERIFY_MS, 1)
        found.observe_draft(4, 8.0)
        found.observe_link(90.0)
    return found


def waited_ms(active: int, missed: bool, full_depth: bool = False) -> float:
    return Proposer(estimates(active), full_depth, lambda: False).wait_for_chain(4, 0, missed).deadline_ns / 1e6


@pytest.mark.parametrize(("active", "missed"), [(1, True), (8, False)])
def test_wait_is_three_expected_times_alone_or_without_a_miss(active: int, missed: bool) -> None:
    assert waited_ms(active, missed) > 3 * 90


def test_a_miss_joins_the_forward_after_the_next() -> None:
    assert waited_ms(8, True) == pytest.approx(VERIFY_MS, rel=0.2)


def test_full_depth_waits_the_full_patience() -> None:
    assert waited_ms(8, True, full_depth=True) >= MAX_FIRST_WAIT_MS


@pytest.mark.parametrize(("verify_ms", "limit_ms"), [(10.0, MAX_WAIT_MS), (9000.0, 27_000.0)])
def test_no_wait_is_longer_than_five_seconds_and_three_forwards(verify_ms: float, limit_ms: float) -> None:
    found = Estimates()
    found.observe_verify(1, verify_ms)
    found.observe_draft(1, 1e9)
    wait = Proposer(found, False, lambda: False).wait_for_chain(4, 0)
    assert wait.deadline_ns / 1e6 == pytest.approx(limit_ms)
