"""The invariants hold whatever the network and the workers do, in random scenarios of `OUTRIDER_STEPS` steps in all.

    OUTRIDER_STEPS=100000 nice python -m pytest tests/network/test_stories.py -s

Without the variable, a short run with fixed seeds: another seed is run while some invariant has not been checked yet.
What a seed generates depends on the loaded modules, and so on which other tests run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.network.invariants import INVARIANTS
from tests.network.stories import TALLY, ClusterStateMachine

STEPS = int(os.environ.get("OUTRIDER_STEPS", "0"))
STEPS_PER_EXAMPLE = 40
EXAMPLES_PER_SEED = 14
MAX_SEEDS = 6


@pytest.mark.timeout(0 if STEPS else 240)
def test_invariants_hold_in_random_stories() -> None:
    seeds = 0
    while TALLY.steps.total() < STEPS if STEPS else seeds < MAX_SEEDS and set(TALLY.checked) != set(INVARIANTS):
        seeds += 1
        run_state_machine_as_test(
            ClusterStateMachine if STEPS else seed(seeds)(ClusterStateMachine),
            settings=settings(
                max_examples=100 if STEPS else EXAMPLES_PER_SEED,
                stateful_step_count=STEPS_PER_EXAMPLE,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
        if STEPS:
            print(f"{TALLY.steps.total()} steps: {TALLY}", flush=True)
    assert set(TALLY.checked) == set(INVARIANTS)
