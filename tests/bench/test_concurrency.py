"""`auto` on simulated machines with one and with many requests: it is as fast as the best mode, and remembers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecasts
from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.protocol.messages import Timings
from tests.bench.virtual_time import VirtualCluster, random_texts
from tools.latency import Latency
from tools.simulation.profile import Profile

PAIR = Profile(
    "a pair like the tiny one", ("none",),
    Latency(((1, 10.5), (4, 12.5), (16, 21.6), (32, 33.0), (64, 53.5), (96, 74.5))),
    Latency(((1, 1.9), (16, 5.5))), 0.1, (0.75,), (0.6, 0.2, 0.1),
)  # fmt: skip
STEEP = replace(PAIR, name="a target whose rows cost as much as tokens", target=Latency(((1, 10.0), (96, 900.0))))
NOTHING = replace(PAIR, name="a draft that knows nothing", acceptance=(0.02,), bonus_ranks=())
# Two x86-64 cores, T = 0.8: forwards with chains take 20 % longer while the drafter runs.
NARROW = Profile(
    "where eight in SSD bring what plain decoding brings", ("none",),
    Latency(((1, 7.1), (4, 9.8), (8, 12.2), (9, 15.0), (16, 19.5), (32, 29.0), (64, 47.7), (128, 85.2))),
    Latency(((1, 1.3), (16, 2.6), (128, 11.7))), 0.1, (0.64, 0.6), (0.55, 0.2, 0.1),
)  # fmt: skip


# Rows cost little, as on a GPU. Drafting a chain for each of four requests takes as long as a verify.
BUSY = Profile(
    "a busy drafter", ("none",), Latency(((1, 20.0), (9, 21.0))), Latency(((1, 4.0), (65, 68.0))), 0.0, (0.8,),
    (0.45, 0.2, 0.1),
)  # fmt: skip


# What eight requests gained in a few rounds of plain decoding takes this drafter several rounds to read.
DEAR = Profile(
    "a drafter whose rows cost much", ("none",), Latency(((1, 20.0), (64, 24.0))),
    Latency(((1, 2.0), (8, 12.0), (64, 90.0))), 0.05, (0.7,), (0.5, 0.2, 0.1),
)  # fmt: skip


def milliseconds(timings: Sequence[Timings]) -> float:
    """Returns the time from the start of the first request to the end of the last."""
    return max(timing.prompt_ms + timing.predicted_ms for timing in timings)


def batch_times(
    profile: Profile, mode: str, at_once: int, batches: int, tokens: int, memory: Sequence[Tuning] = (), seed: int = 3
) -> tuple[list[float], VirtualCluster]:
    """Runs batches of requests one after another on a new server. Returns the milliseconds of each, and the server."""
    texts = random_texts(at_once * batches, tokens + 40, seed)
    cluster = VirtualCluster(profile, texts, depth=4, branches=16, hop_ms=0.1, memory=memory)
    groups = [texts[first : first + at_once] for first in range(0, len(texts), at_once)]
    return [milliseconds(cluster.run_together(group, tokens, mode)) for group in groups], cluster


@pytest.mark.parametrize(
    ("profile", "at_once", "best"),
    [(PAIR, 1, "ssd"), (PAIR, 4, "sd"), (PAIR, 16, "ar"), (STEEP, 1, "ar"), (STEEP, 4, "ar"), (STEEP, 16, "ar")],
    ids=lambda case: getattr(case, "name", None),
)
def test_auto_is_as_fast_as_the_best_mode_at_any_number_of_requests(profile: Profile, at_once: int, best: str) -> None:
    """`best` is the fastest mode, determined by a run of each."""
    last = {mode: batch_times(profile, mode, at_once, 2, 60)[0][-1] for mode in (best, "auto")}
    assert last["auto"] < last[best] / 0.93


def test_requests_do_not_wait_in_turn_for_a_busy_drafter() -> None:
    """A chain after a miss would arrive too late in each round, and delay the drafter's branches for the next round."""
    plain, ssd, auto = (batch_times(BUSY, mode, 4, 3, 60)[0][-1] for mode in ("ar", "ssd", "auto"))
    assert ssd < 0.8 * plain and auto < 0.8 * plain


def test_trial_of_ssd_counts_once_the_drafter_has_caught_up() -> None:
    """It takes ten rounds to read what became final in plain decoding, in which no branch comes."""
    plain, auto = (batch_times(DEAR, mode, 8, 2, 160)[0][-1] for mode in ("ar", "auto"))
    assert auto < 0.9 * plain


@pytest.mark.parametrize("seed", [5, 6])
def test_successive_batches_in_auto_cost_little_more_than_the_best_mode(seed: int) -> None:
    """Trials are few, none uses a request that is about to end, and a mode that is only as fast is not preferred.

    Here plain decoding is the best mode, and SSD takes 2 % longer.
    """
    plain, auto = (sum(batch_times(NARROW, mode, 8, 3, 96, seed=seed)[0]) for mode in ("ar", "auto"))
    assert auto < plain / 0.98


@pytest.mark.parametrize(("profile", "mode"), [(PAIR, "ssd"), (NOTHING, "ar")], ids=["PAIR", "NOTHING"])
def test_first_ten_auto_requests_cost_little_more_than_the_best_mode(profile: Profile, mode: str) -> None:
    best = sum(batch_times(profile, mode, 1, 10, 64)[0])
    fresh, cluster = batch_times(profile, "auto", 1, 10, 64)
    remembered, _ = batch_times(profile, "auto", 1, 10, 64, cluster.rounds.learned())
    assert sum(fresh) < best / 0.95
    assert sum(remembered) < best / 0.95


def test_more_concurrent_requests_get_shorter_chains_and_fewer_branches() -> None:
    estimates = Estimates()
    for rows, verify_ms in PAIR.target.points:
        estimates.observe_verify(rows, verify_ms)
    for _ in range(30):
        estimates.observe_depth(16, 3.5)
    plans = [
        Forecasts(estimates, estimates, at_once, 8, 16, at_once == 1).forecast(Arm("ssd"))[0]
        for at_once in (1, 2, 4, 8, 16)
    ]
    depths, breadths = [plan.depth for plan in plans], [plan.branches for plan in plans]
    assert depths == sorted(depths, reverse=True) and depths[-1] < depths[0]
    assert breadths == sorted(breadths, reverse=True) and breadths[-1] < breadths[0]


def test_mode_learned_to_be_useless_is_not_tried_first_again() -> None:
    fresh, cluster = batch_times(NOTHING, "auto", 1, 3, 64)
    remembered, _ = batch_times(NOTHING, "auto", 1, 1, 64, cluster.rounds.learned())
    assert remembered[0] < 0.97 * fresh[0]
