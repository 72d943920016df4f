"""The invariants hold whatever the network and the workers do: random stories, `OUTRIDER_STEPS` steps in all.

    OUTRIDER_STEPS=100000 nice python -m pytest tests/network/test_stories.py -s

Without the variable, a short run by seeds: the next seed follows while a check was not yet exercised. The story of a
seed depends on the loaded modules, so on which other tests run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.network.stories import TALLY, Stories
from tests.network.watch import HOLDS

STEPS = int(os.environ.get("OUTRIDER_STEPS", "0"))
IN_A_STORY = 40
SHORT = 14
MOST = 6


@pytest.mark.timeout(0 if STEPS else 240)
def test_invariants_hold_in_random_stories() -> None:
    rounds = 0
    while TALLY.steps.total() < STEPS if STEPS else rounds < MOST and set(TALLY.judged) != set(HOLDS):
        rounds += 1
        run_state_machine_as_test(
            Stories if STEPS else seed(rounds)(Stories),
            settings=settings(
                max_examples=100 if STEPS else SHORT,
                stateful_step_count=IN_A_STORY,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
        if STEPS:
            print(f"{TALLY.steps.total()} steps: {TALLY}", flush=True)
    assert set(TALLY.judged) == set(HOLDS)
