"""The measurement of the policy's constants: simulated rounds repeat exactly, and each constant has other values."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.constants import POLICY, PolicyConstants
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.protocol.heads import NGRAM
from tests.harness.settings import round_settings
from tools import policy_constants
from tools.policy_constants import (
    SCENARIOS,
    TWO_CORES,
    USELESS_DRAFT_TEXTS,
    find_best_arms,
    measure_scenario,
    run_scenario,
    use_constants,
    variants,
)
from tools.simulation.auto_rounds import Server, Text

QUIET = replace(TWO_CORES, noise=0.0, cold_ms=0.0)
SEVERAL = next(scenario for scenario in SCENARIOS if scenario.name == "two cores, several requests, disturbed")


def test_rounds_repeat_exactly() -> None:
    first, second = (run_scenario(SEVERAL, 1) for _ in range(2))
    assert (first.spent, first.plans) == (second.spent, second.plans)


def test_plain_decoding_takes_the_machines_time() -> None:
    texts = [Text(USELESS_DRAFT_TEXTS[0], QUIET.profile, 100, random.Random(1)) for _ in range(4)]
    server = Server(QUIET, Planner(round_settings(4, 16)), random.Random(1), Arm("ar", 1))
    forward_ms = QUIET.profile.target(4) * QUIET.all_cores
    assert server.play(texts) == pytest.approx(100 * forward_ms)


def test_auto_loses_little_with_a_useless_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """With such a draft, plain decoding and n-gram copies are the best fixed plans."""
    monkeypatch.setattr(policy_constants, "fixed_plans", lambda _: [Arm("ar", 1), Arm("sd", 4, 16, NGRAM)])
    place = next(i for i, one in enumerate(SCENARIOS) if one.kinds == USELESS_DRAFT_TEXTS and not one.tuned)
    rate, plans = measure_scenario((POLICY, place, 1, find_best_arms(SCENARIOS[place], 1)))
    without = sum(n for plan, n in plans.items() if plan.mode == "ar" or plan.drafter == NGRAM)
    assert rate > 0.93 and without > 0.8 * plans.total()


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyConstants)])
def test_every_constant_is_measured_with_other_values(name: str) -> None:
    found = dict(variants(name))
    assert found and POLICY not in found.values()


def test_changed_constants_change_what_auto_does() -> None:
    try:
        use_constants(replace(POLICY, stay_margin=100.0))
        stubborn = run_scenario(SEVERAL, 1).plans
    finally:
        use_constants(POLICY)
    assert stubborn != run_scenario(SEVERAL, 1).plans
