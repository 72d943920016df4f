"""Branches stay within the memory limits per request and in total: excess ones are dropped and counted."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.orchestrator.core import request
from outrider.orchestrator.core.request import CacheBudget, SpeculationCache
from outrider.orchestrator.events import Admit
from outrider.protocol.messages import Branch, Branches, Span
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ
from tests.orchestrator.cluster_in_process import Cluster
from tools.simulation.replay import Script

pytestmark = pytest.mark.usefixtures("counted_clock")

TEXT = tuple(range(1000, 1300))


def branches(bonus: int, kilobytes: int, final: bool = False) -> Branches:
    width = kilobytes * 128
    q = SparseQ(np.zeros((1, width), np.int32), np.zeros((1, width), np.float32))
    return Branches("r", 0, 0, 3, (Branch((bonus,), (7,)),), Span(0, 1), final, q)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_REQUEST_BYTES", 10 << 10)
    monkeypatch.setattr(request, "MAX_TOTAL_BYTES", 15 << 10)


def test_branches_are_limited_per_request_and_in_total() -> None:
    budget = CacheBudget()
    first, second = SpeculationCache(budget), SpeculationCache(budget)
    for cache in (first, second):
        for bonus in range(20):
            cache.add(branches(bonus, 1), "draft-0")
    assert len(first.branches) == 9 and len(second.branches) == 4 and budget.dropped == 11 + 16
    assert budget.held_bytes <= 15 << 10


def test_budget_is_freed_when_a_round_or_request_ends() -> None:
    budget = CacheBudget()
    first, second = SpeculationCache(budget), SpeculationCache(budget)
    first.add(branches(1, 8), "draft-0")
    second.add(branches(1, 8), "draft-0")
    assert second.lookup((1,)) is None
    first.clear()
    second.add(branches(1, 8), "draft-0")
    second.clear()
    assert budget.held_bytes == 0


def test_drafter_with_dropped_branches_still_counts_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_REQUEST_BYTES", 0)
    cluster = Cluster(TEXT, Script((TEXT,), (0.7,), (1.0,), 4096), ngrams=False, steps=0)
    cluster.rounds.begin(Admit("r", TEXT[:10], SamplingParams(), "ssd", frozenset()), 0)
    draft = cluster.rounds._requests["r"].draft
    assert not draft.final and draft.covered == 0
    cluster.rounds.handle([("draft-0", Branches("r", 0, 0, 10, (Branch((1,), (7,)),), Span(0, 1), final=True))], 0)
    assert draft.final and draft.covered == 8 and not draft.cache.branches


def test_text_is_unchanged_when_branches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_REQUEST_BYTES", 300)
    cluster = Cluster(TEXT, Script((TEXT,), (0.7,), (1.0,), 4096), ngrams=False)
    cluster.run(TEXT[:10], 100)
    assert cluster.generated == list(TEXT[10:110])
    assert cluster.rounds.cache_budget.dropped > 10 and cluster.rounds.cache_budget.held_bytes == 0
