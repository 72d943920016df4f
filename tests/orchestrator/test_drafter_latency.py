"""A round's outcomes are divided by the drafters' latencies, and a slow drafter does not affect the others."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.draft_pool import dealt, evenly, quickest
from outrider.orchestrator.core.policy.estimates import TRIAL_ROUNDS, DrafterLatency

BRANCHES, DEPTH, ROUND_MS = 12, 4, 20.0


def tempo(lag_ms: float, step_ms: float = 2.0) -> DrafterLatency:
    made = DrafterLatency()
    for _ in range(30):
        made.lag_ms.add(lag_ms)
        made.step_ms.add(step_ms)
    return made


def deal(lead: str = "", **latencies: DrafterLatency) -> dict[str, range]:
    return dealt(latencies, dict.fromkeys(latencies), lead, BRANCHES, DEPTH, ROUND_MS)


def test_one_alone_prepares_all_however_slow_it_is() -> None:
    assert deal(a=tempo(1.0)) == deal(a=tempo(500.0)) == {"a": range(12)}


def test_the_quickest_has_the_likeliest_and_those_in_time_share_evenly() -> None:
    found = deal(a=tempo(5.0), b=tempo(3.0), c=tempo(4.0))
    assert found == {"b": range(4), "c": range(4, 8), "a": range(8, 12)}
    assert next(iter(found)) == "b"


def test_who_brings_less_of_the_depth_takes_nothing_from_those_who_bring_it_all() -> None:
    assert deal(a=tempo(3.0), b=tempo(18.0)) == {"a": range(12), "b": range(12, 18)}
    assert deal(a=tempo(3.0), b=tempo(15.0)) == {"a": range(6), "b": range(6, 12)}, "a step less is about as good"


def test_drafters_of_another_model_have_a_ranking_of_their_own() -> None:
    models = {"a": 1, "b": 2, "c": 1, "d": 2}
    found = dealt({name: tempo(3.0) for name in models}, models, "a", BRANCHES, DEPTH, ROUND_MS)
    assert found == {"a": range(6), "c": range(6, 12), "b": range(6), "d": range(6, 12)}
    found = dealt({"a": tempo(3.0), "b": tempo(25.0)}, models, "a", BRANCHES, DEPTH, ROUND_MS)
    assert found == {"a": range(12)}


def test_who_brings_nothing_in_time_is_not_asked_but_for_a_trial_behind_all_others() -> None:
    slow = tempo(25.0)
    assert deal(a=tempo(3.0), b=slow) == {"a": range(12)}
    slow.left_out = TRIAL_ROUNDS
    assert deal(a=tempo(3.0), b=slow) == {"a": range(12), "b": range(12, 18)}


def test_who_was_never_asked_is_tried_at_once_and_more_than_one_at_a_time() -> None:
    assert deal(a=DrafterLatency()) == {"a": range(12)}
    found = deal(b=DrafterLatency(), a=tempo(3.0), c=DrafterLatency())
    assert found == {"a": range(12), "b": range(12, 16), "c": range(16, 20)}


def test_where_nobody_is_in_time_the_quickest_is_asked() -> None:
    assert deal(a=tempo(90.0), b=tempo(60.0)) == {"b": range(12)}


def test_the_lead_changes_only_for_one_that_is_clearly_quicker() -> None:
    near, far = {"a": tempo(5.0), "b": tempo(4.8)}, {"a": tempo(5.0), "b": tempo(1.0)}
    assert quickest(near, DEPTH, "a") == ["a", "b"] and quickest(near, DEPTH) == ["b", "a"]
    assert quickest(far, DEPTH, "a") == ["b", "a"]


def test_who_does_not_answer_loses_its_share_within_a_few_rounds_and_has_it_back_by_one_trial() -> None:
    silent = tempo(3.0)
    rounds = 0
    while silent.share(DEPTH, ROUND_MS) and rounds < 50:
        silent.observe_overdue(ROUND_MS + 5.0)
        rounds += 1
    assert rounds < 12
    silent.left_out = TRIAL_ROUNDS
    silent.reset()
    silent.lag_ms.add(3.0)
    assert silent.share(DEPTH, ROUND_MS) == 1.0


def test_a_round_that_was_shorter_than_a_drafters_lag_says_nothing_of_it() -> None:
    known = tempo(8.0)
    known.observe_overdue(2.0)
    assert known.lag_ms() == pytest.approx(8.0)


def test_even_shares_cover_everything_once_in_the_order_of_names() -> None:
    assert evenly(["a", "b", "c"], 8) == {"a": range(2), "b": range(2, 5), "c": range(5, 8)}
    assert evenly(["a", "b"], 1) == {"b": range(1)}
