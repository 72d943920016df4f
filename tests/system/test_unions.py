"""Trees that unite drafts of a head, branches of a remote drafter and n-grams: the text is the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from outrider.drafters.heads.head import Head
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import DraftTree, TreeUnion, merge_trees
from tests.pairwise import matrix
from tests.system.cluster import AMPLE, MIXED, Cluster, Run
from tests.system.links import VirtualClock
from tests.target_worker.block_heads import block_head
from tests.target_worker.heads import blurred_head, markov_llama, random_head, token_head

LENGTH, HEAD, BOTH = 22, "head", "draft+head"
PROMPT = [40, 41, 42, 7, 8] * 4
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]


@pytest.fixture(scope="module")
def blurred(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A draft model: the target with some noise in its output layer."""
    return markov_llama(tmp_path_factory.mktemp("blurred"), blur=0.05)


def sampling(temp: float) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temp=temp, seed=3 if temp else None)


def run(
    target: LoadedModel,
    head: Head,
    params: SamplingParams,
    mode: str,
    drafter: str,
    draft: LoadedModel | None = None,
    **other: Any,
) -> Run:
    remote_drafter = MlxDrafter(draft or target) if drafter != HEAD else None
    settings = {"schedule": MIXED, "trees": True, **other}
    cluster = Cluster(target, remote_drafter, VirtualClock(), head=head, **settings)
    return cluster.run(PROMPT, params, mode, drafter=drafter)


def accepted_from(found: Run) -> Counter[str]:
    return Counter(found.timings.draft_n_accepted_from)


@matrix(make_head=[token_head, random_head, block_head], way=[("sd", HEAD), ("ssd", BOTH)], temp=[0.0, 0.8])
def test_text_equals_plain_decoding(
    target: LoadedModel, plain: Plain, make_head: Callable[[LoadedModel], Head], way: tuple[str, str], temp: float
) -> None:
    mode, drafter = way
    found = run(target, make_head(target), sampling(temp), mode, drafter)
    assert found.tokens == plain(target, PROMPT, sampling(temp))
    assert sum(accepted_from(found).values()) == found.timings.draft_n_accepted
    assert found.traced == accepted_from(found)


@pytest.fixture
def rows_are_cheap(counted_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows and in-process drafts cost nothing, so that the planner's choices do not depend on measurements."""
    monkeypatch.setattr(Estimates, "row_cost", lambda self: 1e-6)
    monkeypatch.setattr(Estimates, "verify_ms", lambda self, rows: 1.0 + 1e-6 * rows)
    monkeypatch.setattr(Estimates, "in_process_ms", lambda self, tokens, drafter: 1e-6 * tokens)


@pytest.mark.usefixtures("rows_are_cheap")
def test_tree_of_a_head_needs_fewer_rounds_than_its_chain(target: LoadedModel) -> None:
    """With a head whose second choice is often right where its first is wrong."""
    rounds: Counter[bool] = Counter()
    for trees, depth in product((False, True), (2, 3)):
        one = run(target, blurred_head(target), sampling(0.8), "sd", HEAD, trees=trees, ngrams=False, depth=depth)
        rounds[trees] += one.timings.rounds
    assert rounds[True] < 0.9 * rounds[False], rounds


@pytest.mark.usefixtures("rows_are_cheap")
def test_union_needs_fewer_rounds_than_either_drafter(target: LoadedModel, blurred: LoadedModel) -> None:
    rounds: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for params in (SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temp=0.8, seed=1)):
        for mode, drafter in (("sd", HEAD), ("ssd", "draft"), ("ssd", BOTH)):
            one = run(target, blurred_head(target), params, mode, drafter, blurred, schedule=AMPLE)
            rounds[drafter] += one.timings.rounds
            found += accepted_from(one) if drafter == BOTH else Counter()
    assert rounds[BOTH] < min(rounds[HEAD], rounds["draft"]), rounds
    assert min(found[name] for name in ("head", "prepared", "guessed", "copied")) > 0, found


@pytest.mark.usefixtures("rows_are_cheap")
def test_without_trees_branches_and_chains_of_a_head_are_both_accepted(
    target: LoadedModel, blurred: LoadedModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "in_process_ms", lambda self, tokens, drafter: 0.0)
    found = run(target, blurred_head(target), sampling(0.8), "ssd", BOTH, blurred, trees=False, ngrams=False)
    assert found.tokens == plain(target, PROMPT, sampling(0.8))
    assert accepted_from(found)["head"] and accepted_from(found)["prepared"]


def test_united_trees_contain_shared_nodes_once() -> None:
    first = DraftTree((1, 2, 3), (-1, 0, 0))
    assert merge_trees(first, DraftTree((1, 3, 4)), 9) == TreeUnion((1, 2, 3, 4), (-1, 0, 0, 2), (0, 2, 3))
    assert merge_trees(DraftTree(), first, 9) == TreeUnion((1, 2, 3), (-1, 0, 0), (0, 1, 2))
    assert merge_trees(DraftTree((7, 8)), first, 3) == TreeUnion((7, 8, 1), (-1, 0, -1), (2, None, None))
