"""Sampled tokens have the target's probabilities, and are the same on every path.

The target is a Markov chain (tests/system/markov.py), whose distribution is known. Tested by chi-square over seeds and
positions.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.drafters.mlx import MlxDrafter
from outrider.engine import sampling
from outrider.engine.noise import gumbel
from outrider.protocol.sampling import SamplingParams
from tests.system.cluster import AMPLE, MIXED, SLOW, Cluster, Run, Schedule
from tests.system.links import VirtualClock
from tests.system.markov import markov, p_values

V = 4
_rng = np.random.default_rng(5)
TABLE = _rng.normal(size=(V, V)).astype(np.float32)
DRAFT = (0.5 * TABLE + 0.8 * _rng.normal(size=(V, V))).astype(np.float32)
REQUESTS, LENGTH = 40, 48
SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "24"))  # 200 and more: the long form
# Seeds are fixed, so a correct program always passes. With a wrong one, p is smaller by many orders of magnitude.
ALPHA, DETECTED = 1e-3, 1e-7
SAMPLING = SamplingParams(max_tokens=LENGTH, temp=1.0)
PROMPT = [0, 1, 2, 3, 1, 0, 2]

Make = Callable[["Path"], Cluster]


@dataclass(frozen=True)
class Path:
    """A cluster in which at least `share` of the chains come from `source`."""

    mode: str
    source: str
    settings: dict[str, Any]
    share: float = 0.7
    drafts: bool = True


IMPATIENT = Schedule((0,), impatient=1.0)
HITS = {"full_depth": True, "branches": 12, "ngrams": False, "depth": 2}
PATHS = {
    "ar": Path("ar", "target", {}),
    "hit": Path("ssd", "hit", {**HITS, "schedule": AMPLE}),
    "shallow hit": Path("ssd", "hit", {**HITS, "full_depth": False, "schedule": Schedule(turns=(2,))}, share=0.3),
    "miss, then asked": Path("ssd", "drafted", {"branches": 1, "schedule": SLOW, "ngrams": False}, share=0.5),
    "miss, then alone": Path("ssd", "miss", {"branches": 1, "schedule": IMPATIENT, "ngrams": False}, share=0.3),
    "sd": Path("sd", "drafted", {"ngrams": False}),
    "n-gram": Path("ssd", "copied", {}, drafts=False),
    "any": Path("ssd", "hit", {"schedule": MIXED, "branches": 4}, share=0.2),
}


@pytest.fixture
def make(make_cluster: Callable[..., Cluster]) -> Make:
    def cluster(path: Path) -> Cluster:
        drafter = MlxDrafter(markov(DRAFT)) if path.drafts else None
        return make_cluster(drafter, target=markov(TABLE), **path.settings)

    return cluster


def runs(make: Make, path: Path, sampling: SamplingParams = SAMPLING, requests: int = REQUESTS) -> list[Run]:
    cluster = make(path)
    return [cluster.run(PROMPT, sampled(i, sampling), path.mode) for i in range(requests)]


def sampled(number: int, sampling: SamplingParams = SAMPLING) -> SamplingParams:
    return replace(sampling, seed=7919 * number + 3)


def text_p_values(found: Sequence[Run]) -> tuple[float, float]:
    return p_values([[PROMPT[-1], *run.tokens] for run in found], TABLE)


@pytest.fixture(scope="module")
def decoded() -> list[Run]:
    """Requests decoded by the target alone."""
    cluster = Cluster(markov(TABLE), None, VirtualClock())
    return [cluster.run(PROMPT, sampled(i), "ar") for i in range(SEEDS)]


@pytest.mark.parametrize("name", PATHS)
def test_tokens_are_those_of_plain_decoding(make: Make, decoded: list[Run], name: str) -> None:
    """So they have the target's probabilities, because those of plain decoding do (tested below)."""
    found = runs(make, PATHS[name], requests=max(SEEDS // 6, 1))
    assert [run.tokens for run in found] == [run.tokens for run in decoded[: len(found)]]
    sources = sum((run.sources for run in found), Counter[str]())
    assert sources[PATHS[name].source] > PATHS[name].share * sources.total(), sources


def test_tokens_of_plain_decoding_have_the_targets_probabilities(decoded: list[Run]) -> None:
    assert min(text_p_values(decoded)) > ALPHA
    assert len({tuple(run.tokens) for run in decoded}) == SEEDS


def test_wrong_temperature_is_detected(make: Make) -> None:
    assert min(text_p_values(runs(make, PATHS["ar"], replace(SAMPLING, temp=0.8)))) < DETECTED


def test_noise_reused_for_two_positions_is_detected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens would still have the right probabilities, but not pairs."""

    def doubled(xp: Any, seed: int, positions: Sequence[int], vocab_size: int) -> Any:
        return gumbel(xp, seed, [position // 2 for position in positions], vocab_size)

    monkeypatch.setattr(sampling, "gumbel", doubled)
    assert min(text_p_values(runs(make, PATHS["ar"], requests=REQUESTS // 2))) < DETECTED
