"""A drafter's proposals equal those of a fresh drafter, so its cache is valid.

The generated text can't show that, because the target corrects every wrong draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.drafters.drafter import TokenTree
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Branches, Message
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.pairwise import matrix
from tests.slots import open_draft_tree
from tests.system.cluster import AMPLE, MIXED, UNTIL_IDLE, Cluster, Schedule
from tests.system.fresh_drafts import TIE, fresh_scores, mismatches, only_ties
from tests.system.links import intercept
from tests.system.small_models import TOY_CONFIG

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 26, 5, 35, 3, 14, 15]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24),
    "sampled": SamplingParams(max_tokens=24, temp=1.0, top_p=0.95, seed=5),
    "penalised": SamplingParams(max_tokens=24, temp=0.7, repetition_penalty=1.3, presence_penalty=0.4, seed=6),
}
SCHEDULES = {"ample": AMPLE, "one step": Schedule(turns=(2,)), "mixed": MIXED}

Make = Callable[..., Cluster]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]


@matrix(sampling=SAMPLINGS, schedule=SCHEDULES, drafts=[("model", "ssd"), ("model", "sd"), ("random", "ssd")])
def test_every_served_chain_equals_a_fresh_drafters(
    make_cluster: Make, small_pair: Small, sampling: str, schedule: str, drafts: tuple[str, str]
) -> None:
    draft, mode = drafts
    params, model = SAMPLINGS[sampling], small_pair(draft)[1]
    cluster = make_cluster(draft, depth=4, branches=8, ngrams=False, schedule=SCHEDULES[schedule])
    run = cluster.run(PROMPT, params, mode)
    text, served = [*PROMPT, *run.tokens], [round_ for round_ in run.rounds if round_.chain]
    found = [one for round_ in served for one in mismatches(model, text[: round_.base_len], round_.chain, params)]
    assert len(served) > 4
    assert only_ties(found), found
    print("ties:", found)


@pytest.mark.parametrize("seed", range(2))
def test_late_branches_are_not_served_in_another_round(make_cluster: Make, small_pair: Small, seed: int) -> None:
    """With five tokens the same outcomes recur, so a branch of an earlier round would match if it were looked up."""
    params, model = SamplingParams(max_tokens=60, temp=1.0, seed=seed), small_pair("model", **TOY_CONFIG)[1]
    late = Schedule(turns=(1, 2, UNTIL_IDLE), late=0.6, impatient=0.5)
    cluster = make_cluster("model", config=TOY_CONFIG, depth=3, branches=6, ngrams=False, schedule=late, seed=seed)
    run = cluster.run([1, 2, 3, 4], params)
    text = [1, 2, 3, 4, *run.tokens]
    found = [one for round_ in run.rounds for one in mismatches(model, text[: round_.base_len], round_.chain, params)]
    assert run.sources["hit"] > 2
    assert only_ties(found), found


@pytest.mark.parametrize(
    ("sampling", "schedule"), [("greedy", "mixed"), ("sampled", "one step"), ("penalised", "ample")]
)
def test_every_branch_and_its_outcome_equal_a_fresh_drafters(
    make_cluster: Make, small_pair: Small, sampling: str, schedule: str
) -> None:
    """Also branches that are never served; and the chosen outcomes are the drafter's likeliest tokens there."""
    params, model = SAMPLINGS[sampling], small_pair("model")[1]
    cluster = make_cluster("model", depth=3, branches=8, ngrams=False, schedule=SCHEDULES[schedule])
    pushed = record_branches(cluster)
    run = cluster.run(PROMPT, params)
    text = [*PROMPT, *run.tokens]
    verified = {round_.base_len: round_.chain for round_ in run.rounds} | {len(PROMPT): ()}
    checked = 0
    for (base_len, accepted), branches in pushed.items():
        chain = verified[base_len]
        at = [*text[:base_len], *chain[:accepted]]
        for bonus, branch in branches.items():
            assert only_ties(mismatches(model, [*at, bonus], branch, params))
            checked += 1
        scores = fresh_scores(model, at, 1, params)[0]
        if accepted < len(chain):
            scores[chain[accepted]] = -np.inf
        least = np.sort(scores)[-len(branches)]
        assert all(scores[bonus] > least - TIE for bonus in branches)
    assert checked > 25


def record_branches(cluster: Cluster) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
    """Returns a dict that is filled during the run: (base_len, accepted) -> bonus -> the branch's longest chain."""
    pushed: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}

    def listen(sender: str, message: Message, now_ns: int) -> None:
        for entry in message.entries if isinstance(message, Branches) else ():
            known = pushed.setdefault((message.base_len, len(entry.committed) - 1), {})
            bonus = entry.committed[-1]
            known[bonus] = max(known.get(bonus, ()), entry.chain, key=len)
        handle(sender, message, now_ns)

    handle = intercept(cluster.rounds, listen)
    return pushed


@matrix(sampling=SAMPLINGS, schedule=SCHEDULES, mode=["sd", "ssd"])
def test_drafters_cache_holds_the_committed_tokens_every_round(
    make_cluster: Make, small_pair: Small, sampling: str, schedule: str, mode: str
) -> None:
    """Compares the tokens of the columns, and the scores that the model computes from them."""
    params = SAMPLINGS[sampling]
    fresh = MlxDrafter(small_pair("model")[1])
    seen: list[int] = []

    def look(tree: TokenTree, tokens: Sequence[int]) -> None:
        columns = column_tokens(tree)
        assert columns == list(tokens[: len(columns)])
        if not columns or (seen and seen[-1] == tree.committed_len):
            return
        seen.append(tree.committed_len)
        assert len(columns) == tree.committed_len
        again = open_draft_tree(fresh, columns, params)
        (ours,), (theirs,) = tree.candidates([tree.root], 10), again.candidates([again.root], 10)
        assert [c.gap for c in ours] == pytest.approx([c.gap for c in theirs], abs=TIE)
        assert [c.token for c in ours] == [c.token for c in theirs]

    cluster = make_cluster("model", schedule=SCHEDULES[schedule], after_draft=look)
    cluster.run(PROMPT, params, mode)
    assert len(seen) > 8


@matrix(temp=[0.0, 1.0], schedule=SCHEDULES, mode=["sd", "ssd"])
def test_draft_equal_to_the_target_is_always_accepted(
    make_cluster: Make, temp: float, schedule: str, mode: str
) -> None:
    cluster = make_cluster("self", depth=4, branches=8, ngrams=False, schedule=SCHEDULES[schedule])
    times = cluster.run(PROMPT, SamplingParams(max_tokens=100, temp=temp, seed=9), mode).timings
    assert times.draft_n_accepted == times.draft_n > 50


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=101, temp=temp, seed=9) for temp in (0.0, 1.0)])
@pytest.mark.parametrize("depth", [1, 4])
def test_draft_equal_to_the_target_yields_depth_plus_one_tokens_a_round(
    make_cluster: Make, sampling: SamplingParams, depth: int
) -> None:
    cluster = make_cluster("self", depth=depth, branches=8, ngrams=False, full_depth=True)
    run = cluster.run(PROMPT, sampling)
    assert run.timings.cache_misses == 0
    assert [len(round_.chain) for round_ in run.rounds] == [depth] * (100 // (depth + 1))
