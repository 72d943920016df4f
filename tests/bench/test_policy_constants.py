"""The measure of the policy's constants: rounds in arithmetic that repeat exactly, and a changed value of each."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.constants import POLICY, PolicyConstants
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.protocol.heads import NGRAM
from tests.harness.settings import round_settings
from tools.policy_constants import SCENES, TWO_CORES, USELESS, play, result, standard, use, variants
from tools.simulation.auto_rounds import Server, Text

QUIET = replace(TWO_CORES, noise=0.0, cold_ms=0.0)
CROWDS = next(scene for scene in SCENES if scene.name == "two cores, crowds, disturbed")


def test_rounds_repeat_exactly() -> None:
    first, second = (play(CROWDS, 1) for _ in range(2))
    assert (first.spent, first.plans) == (second.spent, second.plans)


def test_plain_decoding_takes_the_machines_time() -> None:
    texts = [Text(USELESS[0], QUIET.profile, 100, random.Random(1)) for _ in range(4)]
    server = Server(QUIET, Planner(round_settings(4, 16)), random.Random(1), Arm("ar", 1))
    forward_ms = QUIET.profile.target(4) * QUIET.all_cores
    assert server.play(texts) == pytest.approx(100 * forward_ms)


def test_auto_loses_little_with_a_useless_draft() -> None:
    place = next(index for index, scene in enumerate(SCENES) if scene.kinds == USELESS and not scene.tuned)
    rate, plans = result((POLICY, place, 1, standard(SCENES[place], 1)))
    without = sum(n for plan, n in plans.items() if plan.mode == "ar" or plan.drafter == NGRAM)
    assert rate > 0.93 and without > 0.8 * plans.total()


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyConstants)])
def test_every_constant_is_measured_with_other_values(name: str) -> None:
    found = dict(variants(name))
    assert found and POLICY not in found.values()


def test_changed_constants_change_what_auto_does() -> None:
    try:
        use(replace(POLICY, stay_margin=100.0))
        stubborn = play(CROWDS, 1).plans
    finally:
        use(POLICY)
    assert stubborn != play(CROWDS, 1).plans
