"""A text does not change when workers are replaced in its middle: random replacements, real models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import Grammar, SamplingParams
from tests.pairwise import matrix
from tests.system.cluster import MIXED, Cluster, Run
from tests.system.same_text import check_same

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 26, 5, 35, 3, 14, 15]
LENGTH = 24
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LENGTH),
    "penalised": SamplingParams(
        max_tokens=LENGTH, temp=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, seed=11
    ),
}
MODES = ("ar", "sd", "ssd", "auto")
Make = Callable[..., Cluster]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]


def disturb(cluster: Cluster, seed: int, share: float = 0.3) -> list[str]:
    """Replaces workers at random during the run, the target only after a new token. Returns the list of replacements,
    which is filled during the run."""
    rng, turn, replaced = random.Random(seed), cluster._turn, list[str]()
    had = -1

    def disturbed() -> None:
        nonlocal had
        turn()
        if cluster.rounds.active and rng.random() < share:
            if len(cluster._tokens) > had and rng.random() < 0.7:
                had = len(cluster._tokens)
                cluster.replace_target()
                replaced.append("target")
            if rng.random() < 0.5:
                cluster.replace_drafter()
                replaced.append("draft")

    cluster._turn = disturbed  # type: ignore[method-assign]
    return replaced


@matrix(mode=MODES, sampling=SAMPLINGS, memory=[0, 10**7])
def test_replacing_workers_changes_no_token(
    make_cluster: Make, small_pair: Small, plain: Plain, mode: str, sampling: str, memory: int
) -> None:
    params, replaced = SAMPLINGS[sampling], list[str]()
    target = small_pair("self")[0]
    for seed in range(2):
        cluster = make_cluster("model", depth=3, branches=6, schedule=MIXED, seed=seed, kv_memory=memory)
        found = disturb(cluster, seed)
        run = cluster.run(PROMPT, params, mode)
        check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))
        assert run.timings.predicted_n == LENGTH and run.timings.resumed == found.count("target")
        replaced += found
    assert {"target", "draft"} <= set(replaced)


@pytest.mark.parametrize("mode", ["sd", "auto"])
def test_replacing_a_target_with_an_in_process_drafter_changes_no_token(
    make_cluster: Make, small_pair: Small, plain: Plain, mode: str
) -> None:
    params, target = SAMPLINGS["penalised"], small_pair("self")[0]
    for seed in range(2):
        cluster = make_cluster(None, colocated="model", ngrams=False, seed=seed)
        replaced = disturb(cluster, seed, share=0.4)
        check_same(target, PROMPT, params, cluster.run(PROMPT, params, mode).tokens, plain(target, PROMPT, params))
        assert "target" in replaced


BYTES = {"vocab_size": 258}
GRAMMAR = Grammar("regex", r"(f\([a-z]{1,4}\);){4,6}( go| gone)?")


def by_grammar(cluster: Cluster, mode: str, resume_tokens: Sequence[int] = ()) -> Run:
    sampling = SamplingParams(max_tokens=60, temp=0.8, seed=11, grammar=GRAMMAR, logprobs=2)
    return cluster.run(PROMPT, sampling, mode, frozenset({0}), resume_tokens)


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_grammar_and_logprobs_continue_after_a_replacement(make_cluster: Make, mode: str) -> None:
    alone = by_grammar(make_cluster(None, config=BYTES, ngrams=False), "ar")
    known, replaced = np.concatenate([one.values for one in alone.logprobs]), set[str]()
    for seed in range(2):
        cluster = make_cluster("model", config=BYTES, seed=seed)
        found = disturb(cluster, seed)
        run = by_grammar(cluster, mode)
        assert (run.tokens, run.reason) == (alone.tokens, alone.reason)
        replaced |= set(found)
        assert np.concatenate([one.values for one in run.logprobs]) == pytest.approx(known, abs=1e-4)
    assert "target" in replaced


# --- texts begun by another server --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [("ar", "greedy"), ("sd", "penalised"), ("ssd", "greedy"), ("ssd", "penalised"), ("auto", "greedy")],
)
def test_text_begun_on_another_server_continues_unchanged(
    make_cluster: Make, small_pair: Small, plain: Plain, mode: str, sampling: str
) -> None:
    params, target = SAMPLINGS[sampling], small_pair("self")[0]
    whole = plain(target, PROMPT, params)
    cluster = make_cluster("model", depth=3, branches=6, schedule=MIXED)
    for count in (1, 7, LENGTH - 1):
        run = cluster.run(PROMPT, params, mode, resume_tokens=whole[:count])
        check_same(target, PROMPT, params, [*whole[:count], *run.tokens], whole)
        assert run.timings.predicted_n == LENGTH - count and run.reason == "length"


@pytest.mark.parametrize("count", [1, 20])
def test_grammar_continues_from_already_generated_tokens(make_cluster: Make, count: int) -> None:
    cluster = make_cluster("model", config=BYTES)
    whole = by_grammar(cluster, "ssd")
    run = by_grammar(cluster, "ssd", whole.tokens[:count])
    assert (whole.tokens[:count] + run.tokens, run.reason) == (whole.tokens, whole.reason)
