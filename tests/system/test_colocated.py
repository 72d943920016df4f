"""A drafter in the target's process changes no token, equals a fresh drafter, and is counted correctly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from outrider import LocalCluster
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Message, Verify
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.pairwise import matrix
from tests.system.cluster import Cluster, Run
from tests.system.fresh_drafts import mismatches, only_ties
from tests.system.links import intercept
from tests.system.markov import markov, p_values
from tests.system.same_text import check_same
from tests.system.small_models import LOOPING_CONFIG
from tests.tiny import Pair

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 26, 5, 35, 3, 14, 15]
LENGTH = 26
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LENGTH),
    "0.8": SamplingParams(max_tokens=LENGTH, temp=0.8, seed=3),
    "top-p": SamplingParams(max_tokens=LENGTH, temp=1.0, top_p=0.9, seed=11),
    "penalties": SamplingParams(
        max_tokens=LENGTH, temp=0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=2**40 + 7
    ),
}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)
two_samplings = pytest.mark.parametrize("sampling", ["greedy", "penalties"])

Make = Callable[..., Cluster]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]


def record_verifies(cluster: Cluster) -> list[Verify]:
    """Returns a list that is filled with the VERIFYs sent to the target, without the rounds that it runs by itself."""
    found: list[Verify] = []
    send = cluster.send_target

    def listen(message: Message) -> None:
        found.extend([message] if isinstance(message, Verify) else [])
        send(message)

    cluster.send_target = listen  # type: ignore[method-assign]
    return found


def check_chains_fit(run: Run, length: int = LENGTH) -> None:
    assert all(round_.base_len + len(round_.chain) < len(PROMPT) + length for round_ in run.rounds)


@matrix(sampling=SAMPLINGS, depth=[1, 3, 6], draft=["model", "random"], ngrams=[True, False], mode=["sd", "auto", "ar"])
def test_text_equals_plain_decoding(
    make_cluster: Make, small_pair: Small, plain: Plain, sampling: str, depth: int, draft: str, ngrams: bool, mode: str
) -> None:
    target, params = small_pair("self")[0], SAMPLINGS[sampling]
    cluster = make_cluster(None, colocated=draft, depth=depth, ngrams=ngrams)
    run = cluster.run(PROMPT, params, mode)
    check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))
    assert (run.reason, run.timings.predicted_n) == ("length", LENGTH)
    check_chains_fit(run)
    if mode == "sd" and not ngrams:
        assert run.sources["drafted"] == run.timings.draft_rounds > 0


@every_sampling
@pytest.mark.parametrize("draft", ["model", "random"])
def test_every_chain_equals_a_fresh_drafters(make_cluster: Make, small_pair: Small, sampling: str, draft: str) -> None:
    params, model = SAMPLINGS[sampling], small_pair(draft)[1]
    run = make_cluster(None, colocated=draft, depth=4, ngrams=False).run(PROMPT, params, "sd")
    text, drafted = [*PROMPT, *run.tokens], [round_ for round_ in run.rounds if round_.chain]
    assert len(drafted) > 6
    assert all(only_ties(mismatches(model, text[: r.base_len], r.chain, params)) for r in drafted)


@every_sampling
def test_drafters_cache_holds_the_committed_tokens(make_cluster: Make, sampling: str) -> None:
    cluster = make_cluster(None, colocated="model", ngrams=False)
    seen = []

    def look(sender: str, message: Message, now_ns: int) -> None:
        for running in cluster.target._running.values():
            parts = list(running._drafting.values())
            columns = column_tokens(parts[0]._work.tree) if parts else []  # type: ignore[union-attr]
            assert columns == running.slot.tokens[: len(columns)]
            seen.append(len(columns))
        handle(sender, message, now_ns)

    handle = intercept(cluster.rounds, look)
    cluster.run(PROMPT, SAMPLINGS[sampling], "sd")
    assert max(seen) > len(PROMPT) + LENGTH // 2


@matrix(temp=[0.0, 1.0], rule=["coupled", "residual"], depth=[1, 4])
def test_draft_equal_to_the_target_is_always_accepted(make_cluster: Make, temp: float, rule: str, depth: int) -> None:
    sampling = SamplingParams(max_tokens=101, temp=temp, seed=9, rule=rule, q_width=1024)
    cluster = make_cluster(None, colocated="self", depth=depth, ngrams=False)
    verifies = record_verifies(cluster)
    times = cluster.run(PROMPT, sampling, "sd").timings
    assert times.draft_n_accepted == times.draft_n == 100 * depth // (depth + 1)
    assert times.accepted_by_position == times.drafted_by_position == (100 // (depth + 1),) * depth
    assert times.draft_rounds == 100 // (depth + 1)
    assert len(verifies) == 1  # the target needs no other message between its rounds


def test_draft_that_is_always_wrong_yields_one_token_a_round(make_cluster: Make) -> None:
    table = np.full((5, 5), -9.0, np.float32)
    right, wrong = table.copy(), table.copy()
    for token in range(5):
        right[token, (token + 1) % 5], wrong[token, (token + 2) % 5] = 9.0, 9.0
    cluster = make_cluster(None, target=markov(right), colocated=markov(wrong), depth=3, ngrams=False)
    run = cluster.run([0, 1, 2], SamplingParams(max_tokens=30), "sd")
    assert run.tokens == [(3 + i) % 5 for i in range(30)]
    assert (run.timings.draft_n_accepted, run.timings.rounds) == (0, 30)
    assert run.timings.drafted_by_position == (28, 27, 26)


@two_samplings
@pytest.mark.parametrize("ngrams", [True, False])
def test_eos_ends_the_text_and_later_draft_tokens_are_not_counted(
    make_cluster: Make, small_pair: Small, plain: Plain, sampling: str, ngrams: bool
) -> None:
    target, params = small_pair("self")[0], SAMPLINGS[sampling]
    truth = plain(target, PROMPT, params)
    end = truth[LENGTH * 3 // 4]
    cluster = make_cluster(None, colocated="self", depth=6, ngrams=ngrams)
    run = cluster.run(PROMPT, params, "sd", frozenset({end}))
    check_same(target, PROMPT, params, run.tokens, truth[: truth.index(end) + 1])
    assert run.reason == "eos"
    # All counted drafts are accepted, because the draft equals the target: tokens past the end are not counted.
    assert ngrams or run.timings.draft_n == run.timings.draft_n_accepted < run.timings.predicted_n


@pytest.mark.parametrize("context", [20, 24, 33])
def test_target_decodes_plainly_past_the_drafts_context(
    make_cluster: Make, small_pair: Small, plain: Plain, context: int
) -> None:
    target, draft = small_pair("model")
    short = replace(draft, context_length=context)
    params = SAMPLINGS["0.8"]
    run = make_cluster(None, colocated=short, ngrams=False).run(PROMPT, params, "sd")
    check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))
    assert all(round_.base_len + len(round_.chain) <= context for round_ in run.rounds if round_.chain)
    assert any(round_.chain for round_ in run.rounds) and not run.rounds[-1].chain


def test_text_ends_at_the_targets_context(make_cluster: Make, small_pair: Small, plain: Plain) -> None:
    target = small_pair("model")[0]
    cluster = make_cluster(None, target=replace(target, context_length=31), colocated="model", depth=6, ngrams=False)
    run = cluster.run(PROMPT, SAMPLINGS["greedy"], "sd")
    assert run.tokens == plain(target, PROMPT, SAMPLINGS["greedy"])[: 31 - len(PROMPT)]
    check_chains_fit(run, 31 - len(PROMPT))


@two_samplings
@pytest.mark.parametrize("vocab_size", [36, 4096])
def test_draft_with_another_vocabulary_size_changes_no_token(
    make_cluster: Make, small_pair: Small, plain: Plain, sampling: str, vocab_size: int
) -> None:
    target, params = small_pair("self")[0], SAMPLINGS[sampling]
    odd = small_pair("random", vocab_size=vocab_size)[1]
    run = make_cluster(None, colocated=odd, ngrams=False).run(PROMPT, params, "sd")
    check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))


def test_ngrams_and_drafter_both_draft_repetitive_text(make_cluster: Make) -> None:
    run = make_cluster(None, colocated="random", config=LOOPING_CONFIG, depth=4).run(
        PROMPT, SamplingParams(max_tokens=200), "sd"
    )
    assert min(run.sources["copied"], run.sources["drafted"]) > 3
    assert run.timings.ngram_chains == run.sources["copied"]


def test_target_is_asked_less_often_when_no_ngrams_match(make_cluster: Make) -> None:
    cluster = make_cluster(None, colocated="model", depth=1)
    cluster._verifies, verifies = [], record_verifies(cluster)
    run = cluster.run([1], SamplingParams(max_tokens=60, temp=1.5, seed=4), "sd")
    assert len(verifies) < run.timings.rounds / 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_the_shortest_requests_end_at_their_length(make_cluster: Make, max_tokens: int) -> None:
    run = make_cluster(None, colocated="self", ngrams=False).run(PROMPT, SamplingParams(max_tokens=max_tokens), "sd")
    assert (len(run.tokens), run.reason) == (max_tokens, "length")
    check_chains_fit(run, max_tokens)


# --- residual sampling ----------------------------------------------------------------------------------------------

TABLE = np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32)
OTHER = -TABLE  # far from the target, so that a wrong q changes the distribution strongly


@pytest.mark.parametrize(("mode", "saguaro"), [("sd", 0.3), ("auto", 1.0)])
def test_residual_texts_have_the_targets_distribution(make_cluster: Make, saguaro: float, mode: str) -> None:
    sampling = SamplingParams(max_tokens=260, temp=1.0, rule="residual", q_width=3, saguaro=saguaro)
    runs = []
    for i in range(3):  # with a new cluster each time, because auto would soon decode plainly
        cluster = make_cluster(None, target=markov(TABLE), colocated=markov(OTHER), depth=3, ngrams=mode == "auto")
        runs.append(cluster.run([0, 1, 2], replace(sampling, seed=7919 * i + 3), mode))
    assert min(p_values([[2, *run.tokens] for run in runs], TABLE)) > 1e-3
    assert sum(run.sources["drafted"] for run in runs) > 50


def test_wrong_q_is_detected_by_the_distribution_check(make_cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would prove nothing."""
    from outrider.target_worker import target_request

    run_together = target_request.run_together

    def flat(proposed: Any) -> Any:
        if getattr(proposed, "q", None) is None:
            return proposed
        return replace(proposed, q=structs.replace(proposed.q, probs=np.full_like(proposed.q.probs, 1 / 3)))

    def flat_together(steps: Any) -> Any:
        found, rows = run_together(steps)
        return [flat(proposed) for proposed in found], rows

    monkeypatch.setattr(target_request, "run_together", flat_together)
    cluster = make_cluster(None, target=markov(TABLE), colocated=markov(OTHER), depth=3, ngrams=False)
    sampling = SamplingParams(max_tokens=260, temp=1.0, rule="residual", q_width=3)
    run = cluster.run([0, 1, 2], replace(sampling, seed=3), "sd")
    assert min(p_values([[2, *run.tokens]], TABLE)) < 1e-7


# --- real processes -------------------------------------------------------------------------------------------------


def test_pair_in_one_process_generates_the_same_text(served: Pair) -> None:
    pair = {"model": served.target, "draft_model": served.draft}
    with LocalCluster(**pair, colocate=True, ngrams=False) as cluster:
        client = cluster.client()
        roles = {worker.role: worker for worker in client.stats().workers}
        assert set(roles) == {"target"} and "drafting in this process" in roles["target"].note
        for sampling in (SamplingParams(max_tokens=32), SamplingParams(max_tokens=32, temp=0.8, seed=5)):
            alone = client.generate("def fibonacci(n):", sampling, mode="ar")
            for depth in (1, 4):
                drafted = client.generate("def fibonacci(n):", sampling, mode="sd", num_draft_tokens=depth)
                assert drafted.token_ids == alone.token_ids
                assert drafted.timings.draft_n > drafted.timings.draft_n_accepted > 0
                assert drafted.draft_model == str(served.draft)
        stopping = replace(sampling, stop=(alone.text[12:15],))
        alone, drafted = (client.generate("def fibonacci(n):", stopping, mode=mode) for mode in ("ar", "sd"))
        assert (drafted.text, drafted.finish_reason) == (alone.text, "stop")
        stream = client.stream("def fibonacci(n):", SamplingParams(max_tokens=400, ignore_eos=True), mode="sd")
        chunks = iter(stream)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]  # cancelled in the middle: the next request is not affected
        drafted = client.generate("def fibonacci(n):", stopping, mode="auto")
        assert drafted.text == alone.text
