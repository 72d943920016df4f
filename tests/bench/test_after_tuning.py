"""After a tuning, `auto` is as fast as the best tuned mode, K and B, even if the tuning's rates are slightly wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from tests.bench.virtual_time import VirtualCluster, random_texts
from tools.latency import Latency
from tools.simulation.profile import Profile

PAIR = Profile(
    "a pair like the tiny one", ("none",), Latency(((1, 10.5), (4, 12.5), (16, 19.0))),
    Latency(((1, 1.9), (16, 5.5))), 0.1, (0.75,), (0.6, 0.2, 0.1),
)  # fmt: skip
SELF = replace(PAIR, name="a draft that is always right", draft=Latency(((1, 6.0),)), acceptance=(1.0,))
NOTHING = replace(PAIR, name="a draft that knows nothing", acceptance=(0.02,), bonus_ranks=())
TOKENS, TEXTS = 200, 1
ERRORS = {"ar": 0.9, "sd": 1.1, "ssd": 0.95}


def choices(profile: Profile) -> tuple[TunedArm, ...]:
    """Returns the best K and B of each mode, out of a few that are run."""
    arms = [("ar", 0, 0), ("sd", 3, 0), ("ssd", 4, 4), ("ssd", 6, 4)]
    found = [TunedArm(mode, k, b, rate(profile, mode, k or 1, b or 1, 1, tokens=100)) for mode, k, b in arms]
    found.sort(key=lambda choice: -choice.tokens_per_second)
    return tuple(next(choice for choice in found if choice.mode == mode) for mode in ("ar", "sd", "ssd"))


def rate(
    profile: Profile,
    mode: str,
    depth: int,
    branches: int,
    texts: int,
    tunings: tuple[Tuning, ...] = (),
    tokens: int = TOKENS,
) -> float:
    known = random_texts(texts, tokens + 60, seed=1)
    cluster = VirtualCluster(profile, known, depth=depth, branches=branches, hop_ms=0.1, tunings=tunings)
    return texts / sum(1 / cluster.run(text, tokens, mode).predicted_per_second for text in known)


def tuning_of(profile: Profile, found: tuple[TunedArm, ...]) -> Tuning:
    """Returns the tuning that `tune` would write, with rates that are wrong by up to 10 %."""
    wrong = (replace(c, tokens_per_second=c.tokens_per_second * ERRORS[c.mode]) for c in found)
    rows = tuple((m, profile.target(m)) for m in range(1, 9))
    hit, step_ms = 0.8, profile.draft(1)
    return Tuning(
        profile.target(1), rows, profile.draft(8), step_ms, 2 * profile.link_ms, 0.3,
        profile.acceptance * 4, hit, tuple(sorted(wrong, key=lambda c: -c.tokens_per_second)),
    )  # fmt: skip


@pytest.mark.parametrize("profile", [PAIR, SELF, NOTHING], ids=lambda profile: profile.name)
def test_auto_is_as_fast_as_the_recommended_mode(profile: Profile) -> None:
    found = choices(profile)
    best = max(found, key=lambda choice: choice.tokens_per_second)
    best_rate = rate(profile, best.mode, best.depth or 1, best.branches or 1, TEXTS)
    auto = rate(profile, "auto", 4, 16, TEXTS, (tuning_of(profile, found),))
    assert auto > 0.95 * best_rate
