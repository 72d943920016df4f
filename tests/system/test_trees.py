"""Draft trees change no text, with any drafter and any timing of its messages: real workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import node_depths
from tests.pairwise import matrix
from tests.system.cluster import MIXED, Cluster, Run
from tests.system.same_text import check_same
from tests.system.test_identity import PROMPT, SAMPLINGS

Make = Callable[..., Cluster]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]
LENGTH = SAMPLINGS["greedy"].max_tokens


@pytest.fixture
def check(small_pair: Small, plain: Plain) -> Callable[[Run, str], None]:
    def check_equals_plain(run: Run, sampling: str) -> None:
        target, params = small_pair("self")[0], SAMPLINGS[sampling]
        check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))
        for round_ in run.rounds:
            deepest = max(node_depths(round_.parents), default=len(round_.chain) - 1) + 1
            assert round_.base_len + deepest < len(PROMPT) + LENGTH

    return check_equals_plain


@matrix(sampling=SAMPLINGS, draft=["model", "random"], mode=["sd", "ssd", "auto"])
def test_trees_keep_the_text_of_plain_decoding(
    make_cluster: Make, check: Callable[[Run, str], None], sampling: str, draft: str, mode: str
) -> None:
    cluster = make_cluster(draft, depth=4, branches=8, schedule=MIXED, seed=2, trees=True)
    for _ in range(2):  # what the planner learned changes no token
        check(cluster.run(PROMPT, SAMPLINGS[sampling], mode), sampling)


@pytest.mark.parametrize(("sampling", "draft"), [("greedy", "random"), ("0.7", "model"), ("1.0", "model")])
def test_trees_of_an_in_process_model_keep_the_text(
    make_cluster: Make, small_pair: Small, check: Callable[[Run, str], None], sampling: str, draft: str
) -> None:
    cluster = make_cluster(None, colocated=small_pair(draft)[1], depth=4, trees=True)
    for _ in range(2):
        check(cluster.run(PROMPT, SAMPLINGS[sampling], "sd"), sampling)


def test_trees_of_every_origin_are_counted_in_timings_and_trace(make_cluster: Make, small_pair: Small) -> None:
    """Otherwise the tests above would prove little."""
    accepted: Counter[str] = Counter()
    forked = 0
    for seed in range(2):
        cluster = make_cluster("model", depth=4, branches=8, schedule=MIXED, seed=seed, trees=True)
        for sampling in SAMPLINGS.values():
            run = cluster.run(PROMPT, sampling, "ssd")
            forked += sum(bool(round_.parents) for round_ in run.rounds)
            found = run.timings.draft_n_accepted_from
            assert sum(found.values()) == run.timings.draft_n_accepted
            assert run.traced == found
            accepted.update(found)
    assert forked > 10, accepted
    assert min(accepted[name] for name in ("prepared", "guessed")) > 1, accepted
