"""Several drafters, in the target's process and outside: which are used, learned from and left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench import prompts
from outrider.orchestrator.core.planner import MOST_REQUESTED, Planner
from outrider.orchestrator.core.policy.acceptance import (
    CODE,
    FREE,
    HELD,
    REPEATING,
    SILENT_ROUNDS,
    TOKENS,
    Drift,
    kind_of,
)
from outrider.orchestrator.core.policy.estimates import Copy, Estimates
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.tuning import TunedArm, load, write
from outrider.orchestrator.core.proposal import NgramIndex
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.events import Admit
from outrider.orchestrator.front.admission import is_code
from outrider.protocol.messages import InProcessDrafter
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings

GOOD, POOR = (
    InProcessDrafter("eagle3", is_head=True, agreement=0.8),
    InProcessDrafter("mtp", is_head=True, agreement=0.1),
)
STEP_MS = 10.0


def asked(mode: str = "auto", drafter: str = "") -> Admit:
    return Admit("r", (1, 2), SamplingParams(), mode, frozenset(), drafter=drafter)


def planner(*own: InProcessDrafter, ngrams: bool = True) -> Planner:
    return Planner(round_settings(4, 16, ngrams=ngrams), own=lambda: own)


def plan(found: Planner, admit: Admit, workers: int = 1) -> Arm:
    return found.first_plan(admit, workers)[0]


def test_without_a_name_draft_workers_draft_then_heads_then_the_text() -> None:
    assert plan(planner(GOOD), asked("ssd")) == Arm("ssd", 4, 16)
    assert plan(planner(GOOD), asked("sd")) == Arm("sd", 4, 16)
    assert plan(planner(GOOD, POOR), asked("sd"), workers=0) == Arm("sd", 4, 16, "eagle3")
    assert plan(planner(GOOD), asked("ssd"), workers=0) == Arm("sd", 4, 16, "eagle3")
    assert plan(planner(), asked("sd"), workers=0) == Arm("sd", 4, 16)


def test_who_is_named_drafts_alone() -> None:
    found = planner(POOR, GOOD)
    assert plan(found, asked("sd", "eagle3")) == Arm("sd", 4, 16, "eagle3")
    assert plan(found, asked("sd", "draft")) == Arm("sd", 4, 16)
    assert plan(found, asked("sd", "ngram")) == Arm("sd", 4, 16, "ngram")
    auto = asked("auto", "mtp")
    kinds = found._policy(auto, found._sources(auto.drafter, 1))._kinds
    assert [(arm.mode, arm.drafter) for arm in kinds] == [("ar", ""), ("sd", "mtp")]


def slow_drafter(admit: Admit, full_depth: bool = False) -> Arm:
    """The plan of a request whose drafter takes a verify's time for a token of 16 branches."""
    found = Planner(round_settings(1, 16, full_depth=full_depth, each=True))
    for number in range(40):
        found.estimates.observe_verify(1, 14.0)
        found.estimates.observe_verify(2, 15.7)
        found.estimates.observe_depth(16, 15.0)
        found.estimates.observe_lookup(number % 4 > 0, 16)
        found.estimates.observe_chain(1, number % 2)
    text = found.profiles.open(FREE, greedy=True)
    request = Request(admit, plan(found, admit), list(admit.tokens), NgramIndex(), 1 << 20, text, {})
    found.replan(request)
    return request.plan


def test_ssd_prepares_what_the_drafter_can_finish_unless_b_is_given() -> None:
    assert slow_drafter(asked("ssd")).branches in (1, 2, 4, 8)
    assert slow_drafter(replace(asked("ssd"), branches=16)).branches == 16
    assert slow_drafter(asked("ssd"), full_depth=True).branches == 16


def test_what_requests_with_a_k_or_b_of_their_own_taught_is_not_kept_without_end() -> None:
    found, usual = planner(), asked()
    first = found._policy(usual, found._sources(usual.drafter, 1))
    for number in range(3 * MOST_REQUESTED):
        plan(found, replace(usual, num_draft_tokens=1 + number % 16, branches=1 + number // 16))
    assert found._policy(usual, found._sources(usual.drafter, 1)) is first
    assert len(found._policies) == MOST_REQUESTED + 1


def rates(policy: Policy, found: dict[str, float], rounds: int = 4000) -> list[str]:
    """Who drafts, a round; each way brings so many tokens a round of `STEP_MS`."""
    said = []
    for _ in range(rounds):
        plan = policy.plan()
        name = plan.drafter or plan.mode
        said.append(name)
        tokens = found[name]
        policy.observe_round(plan, int(tokens) + (len(said) % 10 < 10 * (tokens % 1)), STEP_MS)
    return said


@pytest.mark.parametrize("best", ["ar", "sd", "ssd", "eagle3", "mtp", "ngram"])
def test_auto_comes_to_the_best_of_them_and_stays(best: str) -> None:
    """Whatever it believes of each at first."""
    estimates = Estimates()
    estimates.add_drafters([GOOD, POOR])
    policy = Policy(estimates, ("ar", "sd", "ssd"), 4, 16, others=("eagle3", "mtp", "ngram"))
    found = {"ar": 1.0, "sd": 1.1, "ssd": 1.2, "eagle3": 1.3, "mtp": 1.15, "ngram": 1.05} | {best: 2.0}
    said = rates(policy, found)
    assert sum(name == best for name in said[2000:]) > 0.9 * 2000
    brought = sum(found[name] for name in said[1000:]) / 3000
    assert brought > 0.97 * 2.0


def test_of_one_that_never_drafted_the_trial_at_load_is_believed() -> None:
    estimates = Estimates()
    estimates.add_drafters([GOOD, POOR])
    policy = Policy(estimates, ("ar",), 4, 16, others=("mtp", "eagle3"))
    assert policy.plan().drafter == "eagle3"


def test_what_each_taught_is_remembered_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    before = Estimates()
    before.add_drafters([GOOD, POOR])
    for _ in range(100):
        before.in_process["mtp"].observe(4, 4, 2.0)
    choices = (TunedArm("sd", 0, 0, 200.0, True, drafter="mtp"), TunedArm("ar", 0, 0, 90.0, True))
    write([before.snapshot(choices, 0.0)], path)
    (record,) = load(path)
    after = Estimates()
    after.start_from(record)
    after.add_drafters([GOOD, POOR])
    assert after.in_process_ms(4, "mtp") == pytest.approx(2.0) and after.holding("mtp").rate(0) > 0.4
    policy = Policy(after, ("ar",), 4, 16, others=("eagle3", "mtp"))
    policy.start_from(record.choices)
    assert policy.plan().drafter == "mtp" and "fastest measured before (200 tokens/s)" in policy.why
    without = Policy(after, ("ar",), 4, 16, others=("eagle3",))
    without.start_from(record.choices)
    assert without.plan().drafter != "mtp"


def test_copies_are_forecast_by_what_rounds_show_of_them() -> None:
    estimates = Estimates()
    policy = Policy(estimates, ("ar",), 4, 16, others=("ngram",))
    for _ in range(200):
        estimates.observe_copy(Copy((5, 6, 7), 3), (5, 6, 7, 8))
    assert policy.plan().drafter == "ngram"


def test_one_that_says_nothing_or_nothing_that_holds_is_of_no_use() -> None:
    silent, poor, fair = Drift(), Drift(), Drift()
    assert [bool(silent.observe(0, 0)) for _ in range(SILENT_ROUNDS)] == [False] * (SILENT_ROUNDS - 1) + [True]
    assert [bool(poor.observe(4, 0)) for _ in range(TOKENS // 4)] == [False] * (TOKENS // 4 - 1) + [True]
    assert not any(fair.observe(4, n % 4 == 0) for n in range(10 * TOKENS))
    assert not any(Drift(silent=1).observe(n % 2, 0) for n in range(8))


def test_a_text_that_repeats_itself_or_is_held_is_of_its_own_kind() -> None:
    assert kind_of(range(100), held=False) == FREE
    assert kind_of([*range(30), *range(20)], held=False) == REPEATING
    assert kind_of([1, 2] * 4, held=False) == FREE  # too short to tell
    assert kind_of([*range(40)] * 2 + [*range(100, 700)], held=False) == FREE  # the newest count
    assert kind_of(range(100), held=True) == HELD
    assert [kind_of(text, held=False, code=True) for text in (range(9), [1, 2] * 40)] == [CODE, REPEATING]


def test_the_benchs_code_looks_like_code_and_its_prose_does_not() -> None:
    looks = {kind: {is_code(prompt.text) for prompt in prompts.load(kind)} for kind in ("code", "prose", "json")}
    assert looks == {"code": {True}, "prose": {False}, "json": {True}}
    assert not is_code("f(x)")


def test_who_drafts_best_is_learned_by_kind_of_text_and_remembered() -> None:
    first = planner(GOOD)
    best = {FREE: "eagle3", REPEATING: "ngram"}
    for kind, drafter in best.items():
        policy = first._policy(asked(), first._sources("", 1), kind)
        rates(policy, {"ar": 1, "sd": 1, "ssd": 1, "eagle3": 1, "ngram": 1} | {drafter: 3})
    again = Planner(round_settings(4, 16), memory=first.learned(), own=lambda: (GOOD,))
    for kind, drafter in best.items():
        assert again.first_plan(asked(), 1, kind)[0].drafter == drafter
    again.set_load(2, 0)
    assert again.first_plan(asked(), 1, REPEATING)[0] == again.first_plan(asked(), 1, FREE)[0]
