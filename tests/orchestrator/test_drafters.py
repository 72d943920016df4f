"""Draft workers and in-process drafters: which are used, what is learned about them, and which are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.commands import files
from outrider.orchestrator.core.metrics import RequestMetrics
from outrider.orchestrator.core.planner import MAX_REQUESTED_POLICIES, Planner
from outrider.orchestrator.core.policy.acceptance import (
    CODE_TEXT,
    CONSTRAINED_TEXT,
    GENERAL_TEXT,
    REPEATING_TEXT,
    TextAcceptance,
    classify_text,
)
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.tuning import TunedArm, load, write
from outrider.orchestrator.core.proposal import Proposal
from outrider.orchestrator.core.request import DraftState, PlanState, Request, SequenceState, SpeculationCache
from outrider.orchestrator.events import Admit
from outrider.orchestrator.front.admission import is_code
from outrider.protocol.messages import Abilities, InProcess, InProcessDrafter, Outcome, Span
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings
from tests.orchestrator.rounds import make_settled_round

GOOD, POOR = (
    InProcessDrafter("eagle3", is_head=True, agreement=0.8, weight=0.1),
    InProcessDrafter("mtp", is_head=True, agreement=0.1, weight=0.1),
)
STEP_MS = 10.0


def make_admit(mode: str = "auto", drafter: str = "") -> Admit:
    return Admit("r", (1, 2), SamplingParams(), mode, frozenset(), drafter=drafter)


def planner(*own: InProcessDrafter, ngrams: bool = True) -> Planner:
    return Planner(round_settings(4, 16, ngrams=ngrams), abilities=lambda: Abilities(drafters=own))


def plan(found: Planner, admit: Admit, workers: int = 1) -> Arm:
    return found.first_plan(admit, workers, new_text(found))[0]


def new_text(found: Planner, kind: str = GENERAL_TEXT) -> TextAcceptance:
    return found.open_text(kind, greedy=True)


def test_default_drafter_is_a_worker_then_a_head_then_ngrams() -> None:
    assert plan(planner(GOOD), make_admit("ssd")) == Arm("ssd", 4, 16)
    assert plan(planner(GOOD), make_admit("sd")) == Arm("sd", 4, 16)
    assert plan(planner(GOOD, POOR), make_admit("sd"), workers=0) == Arm("sd", 4, 16, "eagle3")
    assert plan(planner(GOOD), make_admit("ssd"), workers=0) == Arm("sd", 4, 16, "eagle3")
    assert plan(planner(), make_admit("sd"), workers=0) == Arm("sd", 4, 16)


def test_named_drafter_is_the_only_one_used() -> None:
    found = planner(POOR, GOOD)
    assert plan(found, make_admit("sd", "eagle3")) == Arm("sd", 4, 16, "eagle3")
    assert plan(found, make_admit("sd", "draft")) == Arm("sd", 4, 16)
    assert plan(found, make_admit("sd", "ngram")) == Arm("sd", 4, 16, "ngram")
    auto = make_admit("auto", "mtp")
    kinds = found._policy(auto, found._sources(auto.drafter, 1), new_text(found))._base_arms
    assert [(arm.mode, arm.drafter) for arm in kinds] == [("ar", ""), ("sd", "mtp")]


def slow_drafter(admit: Admit, full_depth: bool = False) -> Arm:
    """Returns the plan of a request whose drafter needs as long for a token of 16 branches as a verify takes."""
    found = Planner(round_settings(1, 16, full_depth=full_depth, branches_per_drafter=True))
    for number in range(40):
        found.estimates.observe_verify(1, 14.0)
        found.estimates.observe_verify(2, 15.7)
        found.estimates.observe_depth(16, 15.0)
        found.estimates.observe_lookup(number % 4 > 0, 16)
        found.estimates.observe_chain(1, number % 2)
    request = open_request(found, admit)
    found.replan(request)
    return request.plan


def open_request(found: Planner, admit: Admit, workers: int = 1) -> Request:
    sequence, draft = SequenceState(list(admit.tokens), 1 << 20), DraftState({}, SpeculationCache())
    return Request(admit, sequence, draft, PlanState(plan(found, admit, workers), new_text(found)), RequestMetrics())


def test_ssd_branches_are_limited_to_what_finishes_unless_b_is_given() -> None:
    assert slow_drafter(make_admit("ssd")).branches in (1, 2, 4, 8)
    assert slow_drafter(replace(make_admit("ssd"), branches=16)).branches == 16
    assert slow_drafter(make_admit("ssd"), full_depth=True).branches == 16


def test_number_of_policies_for_custom_k_or_b_is_bounded() -> None:
    found, default = planner(), make_admit()
    first = found._policy(default, found._sources(default.drafter, 1), new_text(found))
    for number in range(3 * MAX_REQUESTED_POLICIES):
        plan(found, replace(default, num_draft_tokens=1 + number % 16, branches=1 + number // 16))
    assert found._policy(default, found._sources(default.drafter, 1), new_text(found)) is first
    assert len(found._policies) == MAX_REQUESTED_POLICIES + 1


def choose_drafters(policy: Policy, found: dict[str, float], rounds: int = 4000) -> list[str]:
    """Runs rounds of `STEP_MS`, in which a drafter or mode yields `found` tokens. Returns the choice of each round."""
    chosen = []
    for _ in range(rounds):
        plan = policy.plan()
        name = plan.drafter or plan.mode
        chosen.append(name)
        tokens = found[name]
        policy.observe_round(plan, int(tokens) + (len(chosen) % 10 < 10 * (tokens % 1)), STEP_MS)
    return chosen


@pytest.mark.parametrize("best", ["ar", "sd", "ssd", "eagle3", "mtp", "ngram"])
def test_auto_converges_to_the_best_drafter(best: str) -> None:
    """Whatever the first estimates of each drafter are."""
    estimates = Estimates()
    estimates.add_drafters([GOOD, POOR])
    policy = Policy(estimates, ("ar", "sd", "ssd"), 4, 16, others=("eagle3", "mtp", "ngram"))
    found = {"ar": 1.0, "sd": 1.1, "ssd": 1.2, "eagle3": 1.3, "mtp": 1.15, "ngram": 1.05} | {best: 2.0}
    chosen = choose_drafters(policy, found)
    assert sum(name == best for name in chosen[2000:]) > 0.9 * 2000
    mean_tokens = sum(found[name] for name in chosen[1000:]) / 3000
    assert mean_tokens > 0.97 * 2.0


def test_unused_drafter_is_judged_by_its_trial_at_load() -> None:
    estimates = Estimates()
    estimates.add_drafters([GOOD, POOR])
    policy = Policy(estimates, ("ar",), 4, 16, others=("mtp", "eagle3"))
    assert policy.plan().drafter == "eagle3"


def test_learned_rates_are_stored_by_drafter_name(tmp_path: Path) -> None:
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
    assert after.in_process_ms(4, "mtp") == pytest.approx(2.0) and after.acceptance_of("mtp").rate(0) > 0.4
    policy = Policy(after, ("ar",), 4, 16, others=("eagle3", "mtp"))
    policy.start_from(record.choices)
    assert policy.plan().drafter == "mtp" and "fastest measured before (200 tokens/s)" in policy.why
    without = Policy(after, ("ar",), 4, 16, others=("eagle3",))
    without.start_from(record.choices)
    assert without.plan().drafter != "mtp"


def test_ngram_forecast_follows_observed_copies() -> None:
    estimates = Estimates()
    policy = Policy(estimates, ("ar",), 4, 16, others=("ngram",))
    for _ in range(200):
        estimates.copies.add(3, 3)
    assert policy.plan().drafter == "ngram"


def test_head_that_proposes_nothing_in_a_row_is_left_out_for_the_request() -> None:
    found, admit = planner(GOOD, POOR), make_admit("sd")
    request = open_request(found, admit, workers=0)
    silent, other = (Proposal(chain, draft=InProcess(4, "eagle3"), drafter="eagle3") for chain in ((), (7,)))
    notes = [
        found.check_in_process_drafter(
            replace(
                make_settled_round(1, one, Outcome("r", 0, 1, 2, 0, 5, Span(0, 1)), 1),
                request=request,
                plan=request.plan,
            )
        )
        for one in (*[silent] * 3, other, *[silent] * POLICY.max_silent_rounds)
    ]
    assert notes == [""] * (3 + POLICY.max_silent_rounds) + [
        "speculation: eagle3 is not used: it proposed nothing in 4 rounds"
    ]
    assert request.plan == Arm("sd", 4, 16, "mtp")


def test_repeating_constrained_and_code_texts_have_their_own_kinds() -> None:
    assert classify_text(range(100), constrained=False) == GENERAL_TEXT
    assert classify_text([*range(30), *range(20)], constrained=False) == REPEATING_TEXT
    assert classify_text([1, 2] * 4, constrained=False) == GENERAL_TEXT  # too short to classify
    assert (
        classify_text([*range(40)] * 2 + [*range(100, 700)], constrained=False) == GENERAL_TEXT
    )  # the latest tokens count
    assert classify_text(range(100), constrained=True) == CONSTRAINED_TEXT
    assert [classify_text(text, constrained=False, code=True) for text in (range(9), [1, 2] * 40)] == [
        CODE_TEXT,
        REPEATING_TEXT,
    ]


def test_is_code_recognizes_bench_code_and_not_prose() -> None:
    looks = {
        kind: {is_code(prompt) for prompt in texts}
        for kind, texts in files.load_prompts(files.TINY_FOLDER, ("code", "prose", "json")).items()
    }
    assert looks == {"code": {True}, "prose": {False}, "json": {True}}
    assert not is_code("f(x)")


def test_best_drafter_is_learned_and_kept_per_kind_of_text() -> None:
    first = planner(GOOD)
    best = {GENERAL_TEXT: "eagle3", REPEATING_TEXT: "ngram"}
    for kind, drafter in best.items():
        policy = first._policy(make_admit(), first._sources("", 1), new_text(first, kind))
        choose_drafters(policy, {"ar": 1, "sd": 1, "ssd": 1, "eagle3": 1, "ngram": 1} | {drafter: 3})
    again = Planner(round_settings(4, 16), memory=first.learned(), abilities=lambda: Abilities(drafters=(GOOD,)))
    for kind, drafter in best.items():
        assert again.first_plan(make_admit(), 1, new_text(again, kind))[0].drafter == drafter
    again.set_load(2)
    assert again.first_plan(make_admit(), 1, new_text(again, REPEATING_TEXT))[0] == plan(again, make_admit())


@pytest.mark.parametrize("settings", [{"draft_backend": "none", "head": ("mtp",)}, {"colocate": True}])
def test_best_drafter_is_learned_where_no_draft_worker_runs(settings: dict[str, Any]) -> None:
    used = replace(round_settings(4, 16), **settings)
    first = Planner(used, abilities=lambda: Abilities(drafters=(GOOD,)))
    choose_drafters(
        first._policy(make_admit(), first._sources("", 0), new_text(first)), {"ar": 1, "eagle3": 3, "ngram": 1}
    )
    again = Planner(used, memory=first.learned(), abilities=lambda: Abilities(drafters=(GOOD,)))
    policy = again._policy(make_admit(), again._sources("", 0), new_text(again))
    assert policy.plan().drafter == "eagle3" and "measured before" in policy.why


def test_nothing_is_learned_where_only_ngrams_draft() -> None:
    """Their arm has the same name as SD with draft workers, which may join the next server."""
    found = Planner(replace(round_settings(4, 16), draft_backend="ngram"))
    choose_drafters(found._policy(make_admit(), found._sources("", 0), new_text(found)), {"ar": 1, "sd": 2})
    assert found.learned() == ()
