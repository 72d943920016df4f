"""Draft workers and an in-process drafter for one request: the costs decide which one drafts."""

from __future__ import annotations

from functools import partial

import pytest

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Costs, Odds, joint_rate, ssd_rate
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.proposal import CopiedTail, choose_fallback, should_merge_in_process
from outrider.protocol.messages import InProcessDrafter

VERIFY_MS, DEPTH, HEAD = 20.0, 4, "mtp"


def estimates(own_ms: float, link_ms: float = 1.0, row_ms: float = 0.1) -> Estimates:
    """Returns estimates after many rounds: half of the lookups hit, and two thirds of all chains are accepted."""
    found = Estimates()
    found.add_drafters([InProcessDrafter(HEAD, is_head=True)])
    for turn in range(60):
        for rows in range(1, 6):
            found.observe_verify(rows, VERIFY_MS + row_ms * rows)
        found.observe_depth(8, 2.0)
        found.observe_draft(1, 2.0)
        found.observe_link(link_ms)
        found.observe_chain(DEPTH, (0, DEPTH, DEPTH)[turn % 3])
        found.in_process[HEAD].observe(DEPTH, (0, DEPTH, DEPTH)[turn % 3], DEPTH * own_ms)
        found.observe_round(3, VERIFY_MS)
        found.observe_lookup(bool(turn % 2))
    return found


@pytest.mark.parametrize(
    ("own_ms", "link_ms", "uses_head"), [(2.0, 30.0, True), (2.0, 0.2, False), (20.0, 30.0, False)]
)
def test_after_a_miss_the_more_productive_drafter_is_used(own_ms: float, link_ms: float, uses_head: bool) -> None:
    found = choose_fallback(estimates(own_ms, link_ms), CopiedTail(), DEPTH, True, HEAD)
    assert bool(found.in_process) == uses_head
    assert not (found.in_process and found.wait_for)


def test_after_a_miss_no_head_is_used_without_one() -> None:
    assert not choose_fallback(estimates(0.1, 30.0), CopiedTail(), DEPTH, True).in_process


@pytest.mark.parametrize(("own_ms", "row_ms", "merges"), [(0.1, 0.1, True), (5.0, 0.1, False), (0.1, 8.0, False)])
def test_head_drafts_beside_a_branch_only_if_both_are_cheap(own_ms: float, row_ms: float, merges: bool) -> None:
    assert should_merge_in_process(estimates(own_ms, row_ms=row_ms), HEAD, DEPTH) == merges


def test_joint_rate_exceeds_ssd_only_with_a_fast_head() -> None:
    """The draft worker is remote. After an accepted chain of the head, no branch is prepared."""
    costs = Costs(10.0, lambda rows: 10.0, lambda depth: 30.0, lambda depth: 5.0, 0.1)
    odds = Odds(lambda depth: 1.0 + 0.5 * depth, 0.5)
    joint = partial(joint_rate, costs, odds, DEPTH, Odds(odds.tokens, 0.0))
    alone = ssd_rate(costs, odds, DEPTH)
    assert joint(1.0) > 1.2 * alone > joint(40.0)
    every_second_hits = odds.tokens(DEPTH) / (10.0 + 0.1 + 0.5 * 20.0)
    assert joint(20.0) < every_second_hits


@pytest.mark.parametrize(("own_ms", "link_ms", "joint"), [(0.5, 60.0, True), (5.0, 0.2, False)])
def test_auto_combines_head_and_worker_only_if_forecast_faster(own_ms: float, link_ms: float, joint: bool) -> None:
    """The first draft worker is remote, so that only SSD pays with it, and the head alone is poor."""
    known = estimates(own_ms, link_ms)
    policy = Policy(known, ("ar", "sd", "ssd"), DEPTH, 16, others=(HEAD,))
    both = Arm("ssd", drafter=HEAD)
    assert both in policy._base_arms
    forecasts = policy._forecasts(1)
    assert policy._beats_alternative(both, forecasts) == joint
    taken = set()
    for _ in range(4000):
        plan = policy.plan()
        taken.add((plan.mode, plan.drafter))
        policy.observe_round(plan, 3, 10.0)
    assert (("ssd", HEAD) in taken) == joint


def test_ngrams_are_not_combined_with_ssd() -> None:
    policy = Policy(Estimates(), ("ar", "sd", "ssd"), DEPTH, 16, others=("ngram",))
    assert Arm("ssd", drafter="ngram") not in policy._base_arms
