"""A round's outcomes are divided by the drafters' latencies, and a slow drafter does not affect the others."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.draft_pool import assign_ranks, sort_by_latency, split_evenly
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import DrafterLatency

BRANCHES, DEPTH, ROUND_MS = 12, 4, 20.0


def latency(lag_ms: float, step_ms: float = 2.0) -> DrafterLatency:
    made = DrafterLatency()
    for _ in range(30):
        made.lag_ms.add(lag_ms)
        made.step_ms.add(step_ms)
    return made


def assign(lead: str = "", **latencies: DrafterLatency) -> dict[str, range]:
    return assign_ranks(latencies, dict.fromkeys(latencies), lead, BRANCHES, DEPTH, ROUND_MS)


def test_single_drafter_prepares_all_outcomes_however_slow() -> None:
    assert assign(a=latency(1.0)) == assign(a=latency(500.0)) == {"a": range(12)}


def test_fastest_drafter_gets_the_likeliest_outcomes_in_even_shares() -> None:
    found = assign(a=latency(5.0), b=latency(3.0), c=latency(4.0))
    assert found == {"b": range(4), "c": range(4, 8), "a": range(8, 12)}
    assert next(iter(found)) == "b"


def test_shallow_drafter_takes_no_outcomes_from_full_depth_drafters() -> None:
    assert assign(a=latency(3.0), b=latency(18.0)) == {"a": range(12), "b": range(12, 18)}
    assert assign(a=latency(3.0), b=latency(15.0)) == {"a": range(6), "b": range(6, 12)}, "a step less is about as good"


def test_each_draft_model_has_its_own_ranking() -> None:
    models = {"a": 1, "b": 2, "c": 1, "d": 2}
    found = assign_ranks({name: latency(3.0) for name in models}, models, "a", BRANCHES, DEPTH, ROUND_MS)
    assert found == {"a": range(6), "c": range(6, 12), "b": range(6), "d": range(6, 12)}
    found = assign_ranks({"a": latency(3.0), "b": latency(25.0)}, models, "a", BRANCHES, DEPTH, ROUND_MS)
    assert found == {"a": range(12)}


def test_late_drafter_is_asked_only_for_occasional_trials() -> None:
    slow = latency(25.0)
    assert assign(a=latency(3.0), b=slow) == {"a": range(12)}
    slow.left_out = POLICY.drafter_trial_rounds
    assert assign(a=latency(3.0), b=slow) == {"a": range(12), "b": range(12, 18)}


def test_untried_drafters_are_all_tried_at_once() -> None:
    assert assign(a=DrafterLatency()) == {"a": range(12)}
    found = assign(b=DrafterLatency(), a=latency(3.0), c=DrafterLatency())
    assert found == {"a": range(12), "b": range(12, 16), "c": range(16, 20)}


def test_fastest_drafter_is_asked_when_all_are_late() -> None:
    assert assign(a=latency(90.0), b=latency(60.0)) == {"b": range(12)}


def test_lead_changes_only_for_a_clearly_faster_drafter() -> None:
    near, far = {"a": latency(5.0), "b": latency(4.8)}, {"a": latency(5.0), "b": latency(1.0)}
    assert sort_by_latency(near, DEPTH, "a") == ["a", "b"] and sort_by_latency(near, DEPTH) == ["b", "a"]
    assert sort_by_latency(far, DEPTH, "a") == ["b", "a"]


def test_silent_drafter_loses_its_share_and_regains_it_by_one_trial() -> None:
    silent = latency(3.0)
    rounds = 0
    while silent.share(DEPTH, ROUND_MS) and rounds < 50:
        silent.observe_overdue(ROUND_MS + 5.0)
        rounds += 1
    assert rounds < 12
    silent.left_out = POLICY.drafter_trial_rounds
    silent.reset()
    silent.lag_ms.add(3.0)
    assert silent.share(DEPTH, ROUND_MS) == 1.0


def test_round_shorter_than_the_lag_does_not_change_it() -> None:
    known = latency(8.0)
    known.observe_overdue(2.0)
    assert known.lag_ms() == pytest.approx(8.0)


def test_even_shares_cover_all_outcomes_once_in_name_order() -> None:
    assert split_evenly(["a", "b", "c"], 8) == {"a": range(2), "b": range(2, 5), "c": range(5, 8)}
    assert split_evenly(["a", "b"], 1) == {"b": range(1)}
