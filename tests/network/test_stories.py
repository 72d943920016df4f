"""Whatever the network and the workers do, what always holds holds: stories at random, `OUTRIDER_STEPS` in all.

    OUTRIDER_STEPS=100000 nice python -m pytest tests/network/test_stories.py -s

Unsaid, a short form that is the same each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.network.stories import TALLY, Stories
from tests.network.watch import HOLDS

STEPS = int(os.environ.get("OUTRIDER_STEPS", "0"))
IN_A_STORY = 40
SHORT = 14


@pytest.mark.timeout(0 if STEPS else 240)
def test_what_always_holds_holds_in_every_story() -> None:
    rounds = 0
    while rounds == 0 or TALLY.steps.total() < STEPS:
        rounds += 1
        run_state_machine_as_test(
            Stories,
            settings=settings(
                max_examples=100 if STEPS else SHORT,
                stateful_step_count=IN_A_STORY,
                deadline=None,
                derandomize=not STEPS,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
        if STEPS:
            print(f"{TALLY.steps.total()} steps: {TALLY}", flush=True)
    assert set(TALLY.judged) == set(HOLDS)
