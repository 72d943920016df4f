"""How long a request waits for a chain, and that it does not wait after a miss while other requests run."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.next_round import MAX_FIRST_WAIT_MS, MAX_WAIT_MS, Proposer
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import CopiedTail, choose_fallback

VERIFY_MS = 40.0


def estimates(active: int, link_ms: float = 90.0) -> Estimates:
    """Returns estimates for a drafter that is busy with a long prompt."""
    found = Estimates()
    found.active = active
    for _ in range(50):
        found.observe_verify(8, VERIFY_MS, 1)
        found.observe_draft(4, 8.0)
        found.observe_link(link_ms)
    return found


def wait_limit_ms(active: int, full_depth: bool = False) -> float:
    return Proposer(estimates(active), full_depth, lambda: False).wait_for_chain(4, 0).deadline_ns / 1e6


@pytest.mark.parametrize("active", [1, 8])
def test_wait_is_three_expected_times(active: int) -> None:
    assert wait_limit_ms(active) > 3 * 90


def test_full_depth_waits_for_the_maximum_time() -> None:
    assert wait_limit_ms(8, full_depth=True) >= MAX_FIRST_WAIT_MS


@pytest.mark.parametrize(("verify_ms", "limit_ms"), [(10.0, MAX_WAIT_MS), (9000.0, 27_000.0)])
def test_no_wait_is_longer_than_five_seconds_and_three_forwards(verify_ms: float, limit_ms: float) -> None:
    found = Estimates()
    found.observe_verify(1, verify_ms)
    found.observe_draft(1, 1e9)
    wait = Proposer(found, False, lambda: False).wait_for_chain(4, 0)
    assert wait.deadline_ns / 1e6 == pytest.approx(limit_ms)


@pytest.mark.parametrize(("active", "requested"), [(1, True), (2, False)])
def test_chain_is_requested_after_a_miss_only_by_a_request_alone(active: int, requested: bool) -> None:
    """However fast the drafter is: a request that waits would miss the next forward of the others."""
    choice = choose_fallback(estimates(active, 0.1), CopiedTail(), 4, True)
    assert bool(choice.wait_for) == requested


def test_queueing_behind_other_requests_is_not_expected_by_a_single_request() -> None:
    found = estimates(1, 1.0)
    found.active = 8
    for _ in range(50):
        found.observe_link(90.0)
    assert found.draft_ms(1) > 60
    found.active = 1
    assert found.draft_ms(1) < 4
