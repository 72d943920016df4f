"""The policy chooses the fastest arm, adapts when rates change, and needs no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecasts
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.tuning import TunedArm
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import InProcessDrafter

MODES = ("ar", "sd", "ssd")


def run(policy: Policy, rates: dict[str, float], rounds: int) -> Counter[str]:
    """Runs rounds in which each mode yields these tokens per millisecond. Counts the rounds by mode."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        plan = policy.plan()
        seen[plan.mode] += 1
        tokens = 1 if plan.mode == "ar" else 3
        policy.observe_round(plan, tokens, tokens / rates[plan.mode])
    return seen


def rates_of(**rates: float) -> dict[str, float]:
    return rates


@pytest.mark.parametrize("best", MODES)
def test_policy_settles_on_the_fastest_mode(best: str) -> None:
    rates = {mode: 0.12 if mode == best else 0.08 for mode in MODES}
    policy = Policy(Estimates(), MODES, 4)
    run(policy, rates, 20 * POLICY.episode_rounds)
    assert run(policy, rates, 200 * POLICY.episode_rounds)[best] > 0.9 * 200 * POLICY.episode_rounds


def test_nearly_all_rounds_are_plain_if_speculation_does_not_pay() -> None:
    rates = rates_of(ar=0.1, sd=0.03, ssd=0.05)
    policy = Policy(Estimates(), MODES, 4)
    run(policy, rates, 50 * POLICY.episode_rounds)
    assert run(policy, rates, 400 * POLICY.episode_rounds)["ar"] > 0.97 * 400 * POLICY.episode_rounds


def test_slow_trial_ends_early() -> None:
    policy = Policy(Estimates(), MODES, 4)
    rates = rates_of(ar=0.1, sd=0.03, ssd=0.05)
    run(policy, rates, 50 * POLICY.episode_rounds)
    before = policy.plan()
    assert before.mode == "ar"
    lengths, last = [], before
    for _ in range(400 * POLICY.episode_rounds):
        plan = policy.plan()
        if plan.mode != "ar":
            lengths = [*lengths[:-1], lengths[-1] + 1] if plan is last else [*lengths, 1]
        policy.observe_round(plan, 1 if plan.mode == "ar" else 3, (1 if plan.mode == "ar" else 3) / rates[plan.mode])
        last = plan
    assert lengths and max(lengths) < POLICY.episode_rounds / 2


def test_forward_on_all_cores_is_measured_in_the_first_rounds() -> None:
    """A large target may gain more from the drafters' core than from their drafts, which only a measurement shows."""
    found = Estimates()
    found.may_use_all_cores = True
    policy, seen = Policy(found, MODES, 4, 16, others=(NGRAM,)), []
    for _ in range(10 * POLICY.episode_rounds):
        plan = policy.plan()
        seen.append(plan)
        resting = plan.leaves_drafters_idle(1)
        found.observe_verify(1, 28.0 if resting else 46.0, all_cores=resting)
        if plan.mode == "ssd":
            found.observe_chain(1, 0)
            found.observe_lookup(hit=False)
        policy.observe_round(plan, 1, 28.0 if resting else 46.0)
    assert seen[0].leaves_drafters_idle(1)
    assert all(plan.leaves_drafters_idle(1) for plan in seen[2 * POLICY.episode_rounds :])


def test_target_that_never_uses_all_cores_is_not_measured_on_them() -> None:
    assert Policy(Estimates(), MODES, 4, 16, others=(NGRAM,)).plan().mode == "ssd"


def test_policy_adapts_to_changed_rates() -> None:
    policy = Policy(Estimates(), MODES, 4)
    run(policy, rates_of(ar=0.1, sd=0.12, ssd=0.2), 50 * POLICY.episode_rounds)
    changed = rates_of(ar=0.1, sd=0.05, ssd=0.04)
    run(policy, changed, 100 * POLICY.episode_rounds)
    assert run(policy, changed, 50 * POLICY.episode_rounds)["ar"] > 40 * POLICY.episode_rounds


@pytest.mark.parametrize(("drafted", "best"), [(2, "ssd"), (1, "ar")])
def test_rounds_of_several_requests_count_once_the_drafters_keep_up(drafted: int, best: str) -> None:
    """Before, they are as slow as plain decoding, and would end the trial of a mode that may be faster. A trial ends,
    too, if the drafters never keep up."""
    policy, active, behind, modes = Policy(Estimates(), ("ar", "ssd"), 4), 8, 0, list[str]()
    policy.set_load(active)
    for _ in range(200 * POLICY.episode_rounds * active):
        plan = policy.plan()
        behind = max(behind - 1, 0) if plan.mode == "ssd" and drafted > 1 else 10 * active
        tokens = 1 if behind or plan.mode == "ar" else drafted
        policy.observe_round(plan, tokens, 10.0 + 0.1 * (plan.mode == "ssd"), plan.mode == "ssd" and not behind)
        modes.append(plan.mode)
    late = modes[len(modes) // 2 :]
    assert late.count(best) > 0.9 * len(late)


def test_plans_are_deterministic() -> None:
    def plans() -> list[Arm]:
        policy = Policy(Estimates(), MODES, 4)
        found = []
        for index in range(500):
            plan = policy.plan()
            found.append(plan)
            policy.observe_round(plan, 1 + index % 3, 10.0 + index % 7)
        return found

    assert plans() == plans()


def test_tuning_skips_the_first_trials() -> None:
    policy = Policy(Estimates(), MODES, 4)
    choices = [TunedArm("ssd", 3, 8, 200.0), TunedArm("sd", 3, 0, 150.0), TunedArm("ar", 0, 0, 90.0)]
    policy.start_from(choices)
    rates = rates_of(ar=0.09, sd=0.15, ssd=0.2)
    assert run(policy, rates, 5 * POLICY.episode_rounds)["ssd"] == 5 * POLICY.episode_rounds


TUNED = (TunedArm("ssd", 6, 4, 204.0), TunedArm("sd", 3, 0, 140.0), TunedArm("ar", 0, 0, 92.0))


def tuned_policy(choices: tuple[TunedArm, ...] = TUNED) -> Policy:
    policy = Policy(Estimates(), MODES, 4, 16)
    policy.start_from(choices)
    return policy


@pytest.mark.parametrize("best", [TunedArm("ssd", 6, 4, 204.0), TunedArm("sd", 8, 0, 300.0)])
def test_policy_starts_with_the_tuned_k_and_b(best: TunedArm) -> None:
    others = [choice for choice in TUNED if choice.mode != best.mode]
    assert tuned_policy((*others, best)).plan() == Arm(best.mode, best.depth, best.branches or 16)


def test_tuned_k_for_several_requests_is_ignored() -> None:
    policy = tuned_policy((TunedArm("sd", 5, 0, 900.0, at_once=4),))
    policy.set_load(4)
    assert run(policy, rates_of(ar=0.3, sd=0.1, ssd=0.1), POLICY.episode_rounds).total() == POLICY.episode_rounds


def rounds_at(policy: Policy, rates: dict[int, float], episodes: int) -> Counter[Arm]:
    """Runs rounds in which SSD yields the rate of its K, and other modes their tuned rates. Counts rounds by plan."""
    seen: Counter[Arm] = Counter()
    for _ in range(episodes * POLICY.episode_rounds):
        plan = policy.plan()
        seen[plan] += 1
        rate = rates[plan.depth] if plan.mode == "ssd" else {"sd": 0.14, "ar": 0.092}[plan.mode]
        tokens = 1 if plan.mode == "ar" else 3
        policy.observe_round(plan, tokens, tokens / rate)
    return seen


@pytest.mark.parametrize("others", [0.12, 0.19])
def test_tuned_k_and_b_are_kept_despite_a_wrong_forecast(others: float) -> None:
    """The other K are slower, whatever the formula forecasts."""
    rates = dict.fromkeys(range(1, 9), others) | {6: 0.204}
    seen = rounds_at(tuned_policy(), rates, 100)
    assert seen[Arm("ssd", 6, 4)] > 0.93 * seen.total()


@pytest.mark.parametrize("plain_ms", [2.0, 5.0, 40.0])
def test_remembered_rate_that_is_ten_times_too_high_is_outweighed(plain_ms: float) -> None:
    """However long the rounds take, because its weight falls with their number."""
    estimates = Estimates()
    for rows in (1, 3, 5):
        estimates.observe_verify(rows, plain_ms * (1 + rows / 10))
    rates = rates_of(ar=1 / plain_ms, sd=0.8 / plain_ms, ssd=0.75 / plain_ms)
    policy = Policy(estimates, MODES, 4, 16)
    policy.start_from(
        [TunedArm("ssd", 0, 0, 10_000 * rates["ssd"], True), TunedArm("ar", 0, 0, 1000 * rates["ar"], True)]
    )
    assert policy.plan().mode == "ssd"
    run(policy, rates, 30 * POLICY.episode_rounds)
    assert run(policy, rates, 100 * POLICY.episode_rounds)["ar"] > 95 * POLICY.episode_rounds


def test_another_k_is_used_once_measured_faster() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.observe_chain(4, 1)  # the second token is rarely accepted, so the formula prefers short chains
        estimates.observe_verify(5, 20.0)
        estimates.observe_verify(2, 10.0)
    policy = Policy(estimates, MODES, 4, 16)
    policy.start_from(TUNED)
    rates = dict.fromkeys(range(1, 9), 0.12) | {1: 0.2, 2: 0.2}
    rounds_at(policy, rates, 60)
    late = rounds_at(policy, rates, 60)
    assert sum(count for plan, count in late.items() if plan.depth in (1, 2)) > 0.85 * late.total()


def test_reason_says_forecast_until_measured() -> None:
    policy = tuned_policy()
    policy.plan()
    assert "forecast" in policy.why and "K = 6, B = 4" in policy.why and "measured" not in policy.why
    rounds_at(policy, {6: 0.2}, 2)
    assert "forecast" not in policy.why and "measured" in policy.why


def test_reason_has_no_rate_before_a_measurement() -> None:
    policy = Policy(Estimates(), MODES, 4)
    seen = set()
    for _ in range(5 * POLICY.episode_rounds):
        plan = policy.plan()
        seen.add("tokens/s" in policy.why)
        assert "tokens/s" not in policy.why or "fastest measured" in policy.why
        policy.observe_round(plan, 1, 10.0)
    assert seen == {False, True}


def test_reason_says_measured_before_for_an_earlier_run() -> None:
    policy = tuned_policy(tuple(replace(choice, measured=True) for choice in TUNED))
    policy.plan()
    assert "measured before" in policy.why and "forecast" not in policy.why


def test_every_choice_has_a_reason() -> None:
    policy = Policy(Estimates(), MODES, 4)
    for _ in range(5 * POLICY.episode_rounds):
        plan = policy.plan()
        assert policy.why.startswith(plan.mode)
        policy.observe_round(plan, 1, 10.0)


def test_policy_with_only_ar_always_chooses_ar() -> None:
    policy = Policy(Estimates(), ("ar",), 4)
    assert {policy.plan().mode for _ in range(50)} == {"ar"}


def run_concurrent(policy: Policy, rates: dict[str, float], rounds: int, active: int = 8) -> Counter[str]:
    """Runs rounds of `active` concurrent requests, where each mode yields these tokens per millisecond in total."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        for _ in range(active):
            plan = policy.plan()
            seen[plan.mode] += 1
            policy.observe_round(plan, 1, active / rates[plan.mode])
    return seen


def test_old_measurement_with_concurrent_requests_yields_to_the_forecast() -> None:
    """A mode that was slow once, on a busy machine, is tried again if the formula forecasts it to be the fastest."""
    estimates = Estimates()
    for rows, milliseconds in ((1, 10.0), (4, 11.0), (16, 14.0)):
        estimates.observe_verify(rows, milliseconds)
    for _ in range(100):
        estimates.observe_depth(16, 0.5)
    policy = Policy(estimates, MODES, 4, 16)
    policy.set_load(4)
    run_concurrent(policy, rates_of(ar=0.38, sd=0.1, ssd=0.1), 30 * POLICY.episode_rounds, 4)
    assert (
        run_concurrent(policy, rates_of(ar=0.38, sd=0.1, ssd=0.7), 150 * POLICY.episode_rounds, 4)["ssd"]
        > 50 * POLICY.episode_rounds * 4
    )


def test_one_delayed_round_does_not_change_the_chosen_mode() -> None:
    policy = Policy(Estimates(), MODES, 4, 16)
    policy.set_load(8)
    rates = rates_of(ar=0.3, sd=0.1, ssd=0.25)
    run_concurrent(policy, rates, 100 * POLICY.episode_rounds + POLICY.episode_rounds // 2)
    run_concurrent(policy, rates_of(ar=0.003, sd=0.003, ssd=0.003), 1)
    assert run_concurrent(policy, rates, 20 * POLICY.episode_rounds)["ar"] > 18 * POLICY.episode_rounds * 8


@pytest.mark.parametrize(
    "stalled",
    [
        lambda estimates: estimates.observe_turnaround(1000.0),
        lambda estimates: estimates.observe_link(1000.0),
        lambda estimates: estimates.observe_depth(16, 1000.0),
        lambda estimates: estimates.observe_draft(4, 4000.0),
        lambda estimates: estimates.in_process["head"].observe(4, 2, 4000.0),
        lambda estimates: estimates.observe_verify(5, 1000.0),
    ],
)
def test_one_stall_hardly_changes_a_forecast(stalled: Callable[[Estimates], None]) -> None:
    """Otherwise the policy would avoid the only arms whose rounds can correct the estimate."""
    estimates = Estimates()
    estimates.add_drafters([InProcessDrafter("head", "", True, 0.6, weight=0.1)])
    for _ in range(50):
        for rows in (1, 3, 5):
            estimates.observe_verify(rows, 20.0 + rows)
        estimates.observe_turnaround(0.1)
        estimates.observe_link(0.5)
        estimates.observe_depth(16, 3.0)
        estimates.observe_draft(4, 8.0)
        estimates.in_process["head"].observe(4, 2, 8.0)

    def rates() -> list[float]:
        formula = Forecasts(estimates, estimates, 1, 4, 16, True)
        arms = (Arm("ar"), Arm("sd"), Arm("ssd"), Arm("sd", drafter="head"), Arm("ssd", drafter="head"))
        return [formula.forecast(arm)[1] for arm in arms]

    before = rates()
    stalled(estimates)
    assert rates() == pytest.approx(before, rel=0.2)


def test_plain_decoding_is_measured_first_with_concurrent_requests() -> None:
    policy = Policy(Estimates(), MODES, 4, 16)
    policy.set_load(8)
    assert policy.plan().mode == "ar"
    seen = run_concurrent(policy, rates_of(ar=0.1, sd=0.1, ssd=0.4), 4 * POLICY.episode_rounds)
    assert 0 < seen["ar"] < 8 * POLICY.episode_rounds
    policy.set_load(1)
    assert Policy(Estimates(), MODES, 4, 16).plan().mode != "ar"


def test_choice_is_due_when_all_requests_but_one_have_left() -> None:
    """Even if the arm that was chosen for several requests was never run with a single one."""
    policy = Policy(Estimates(), MODES, 4, 16)
    policy.set_load(2)
    policy.plan()
    policy.set_load(1)
    assert policy.is_due and policy.plan()


def test_plain_decoding_with_a_slow_start_is_soon_remeasured() -> None:
    """The first rounds of concurrent requests may be slow because the process has just started."""
    estimates = Estimates()
    for rows, milliseconds in ((1, 38.0), (8, 40.0), (16, 44.0)):
        estimates.observe_verify(rows, milliseconds)
    policy = Policy(estimates, MODES, 4, 16)
    policy.set_load(8)
    run_concurrent(policy, rates_of(ar=0.2, sd=0.1, ssd=0.25), 4)
    seen = run_concurrent(policy, rates_of(ar=0.3, sd=0.1, ssd=0.25), 20 * POLICY.episode_rounds)
    assert seen["ar"] > 8 * 10 * POLICY.episode_rounds


def test_equally_promising_mode_is_tried_early_with_concurrent_requests() -> None:
    """Concurrent requests may end after a few episodes."""
    estimates = Estimates()
    for rows, milliseconds in ((1, 10.0), (4, 11.0), (16, 14.0)):
        estimates.observe_verify(rows, milliseconds)
    policy = Policy(estimates, MODES, 4, 16)
    policy.set_load(4)
    promised = Forecasts(estimates, estimates, 4, 4, 16, False).forecast(Arm("ssd"))[1]
    seen = run_concurrent(policy, rates_of(ar=promised, sd=0.1, ssd=2 * promised), 3 * POLICY.episode_rounds, 4)
    assert seen["ssd"] > POLICY.episode_rounds * 4


def test_formula_does_not_change_a_tuned_rate() -> None:
    """Before the arm is measured, new estimates of the formula's costs do not change its rate."""
    estimates = Estimates()
    policy = Policy(estimates, MODES, 4, 16)
    policy.start_from(TUNED)
    policy.plan()
    for _ in range(50):
        estimates.observe_verify(7, 60.0)
        estimates.observe_depth(4, 12.0)
    for _ in range(2 * POLICY.min_episode_rounds):
        plan = policy.plan()
        assert plan == Arm("ssd", 6, 4) and "by tune's forecast" in policy.why
        assert max(record.rate or 0.0 for record in policy._records.values()) == pytest.approx(0.204)
        policy.observe_round(plan, 1, 0.0)


def test_confirming_episode_keeps_the_tuned_rate() -> None:
    policy = tuned_policy()
    rounds_at(policy, {6: 0.204}, 1)
    policy.plan()
    assert "204 tokens/s" in policy.why


def test_faster_trial_continues_until_adopted() -> None:
    """However slow the formula forecasts it to be."""
    policy = tuned_policy()
    rates = rates_of(ar=0.092, sd=0.14, ssd=0.1)
    run(policy, rates, 12 * POLICY.episode_rounds)
    assert run(policy, rates, 2 * POLICY.episode_rounds)["sd"] > POLICY.episode_rounds
    better = rates_of(ar=0.3, sd=0.14, ssd=0.1)
    seen = run(policy, better, 60 * POLICY.episode_rounds)
    assert seen["ar"] > 10 * POLICY.episode_rounds
    assert run(policy, better, 10 * POLICY.episode_rounds)["ar"] == 10 * POLICY.episode_rounds
