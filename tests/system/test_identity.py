"""The text is the target's own with any drafter and any timing of its messages: a matrix of settings, real workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams
from tests.pairwise import matrix
from tests.system.cluster import AMPLE, MIXED, SLOW, Cluster, Run, Schedule
from tests.system.same_text import check_same
from tests.system.small_models import LOOPING_CONFIG

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 26, 5, 35, 3, 14, 15]
LENGTH = 22
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LENGTH),
    "0.7": SamplingParams(
        max_tokens=LENGTH, temp=0.7, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, seed=11
    ),
    "1.0": SamplingParams(max_tokens=LENGTH, temp=1.0, top_p=0.95, frequency_penalty=0.2, seed=2**40 + 7),
}
DEPTHS = (1, 3, 6)
BRANCHES = (1, 6, 16)
DRAFTERS = {"n-gram + model": ("model", True), "model": ("model", False), "random": ("random", True)}
SCHEDULES = (AMPLE, SLOW, Schedule(turns=(1,)), Schedule(turns=(2,), late=1.0, impatient=1.0))
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)

Make = Callable[..., Cluster]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]
Small = Callable[..., tuple[LoadedModel, LoadedModel]]
Check = Callable[[Run, str], None]


@pytest.fixture
def check(small_pair: Small, plain: Plain) -> Check:
    def check_equals_plain(run: Run, sampling: str) -> None:
        target, params = small_pair("self")[0], SAMPLINGS[sampling]
        check_same(target, PROMPT, params, run.tokens, plain(target, PROMPT, params))
        assert run.reason == "length"
        assert run.timings.predicted_n == LENGTH
        # Every chain leaves room for the bonus token within max_tokens.
        assert all(round_.base_len + len(round_.chain) < len(PROMPT) + LENGTH for round_ in run.rounds)

    return check_equals_plain


@matrix(sampling=SAMPLINGS, depth=DEPTHS, branches=BRANCHES, policy=sorted(FAN_OUT_POLICIES), drafter=DRAFTERS)
def test_ssd_text_equals_plain_decoding(
    make_cluster: Make, check: Check, sampling: str, depth: int, branches: int, policy: str, drafter: str
) -> None:
    draft, ngrams = DRAFTERS[drafter]
    cluster = make_cluster(
        draft, depth=depth, branches=branches, policy=policy, ngrams=ngrams, schedule=MIXED, seed=depth + branches
    )
    check(cluster.run(PROMPT, SAMPLINGS[sampling], "ssd"), sampling)


@matrix(sampling=SAMPLINGS, depth=DEPTHS, drafter=DRAFTERS, mode=["sd", "auto"])
def test_sd_and_auto_text_equals_plain_decoding(
    make_cluster: Make, check: Check, mode: str, sampling: str, depth: int, drafter: str
) -> None:
    draft, ngrams = DRAFTERS[drafter]
    cluster = make_cluster(draft, depth=depth, ngrams=ngrams, schedule=MIXED, seed=depth)
    check(cluster.run(PROMPT, SAMPLINGS[sampling], mode), sampling)
    check(cluster.run(PROMPT, SAMPLINGS[sampling], mode), sampling)  # what the planner learned changes no token


@matrix(sampling=SAMPLINGS, depth=DEPTHS, mode=["sd", "ssd", "auto"])
def test_text_drafted_by_ngrams_only_equals_plain_decoding(
    make_cluster: Make, check: Check, mode: str, sampling: str, depth: int
) -> None:
    check(make_cluster(None, depth=depth).run(PROMPT, SAMPLINGS[sampling], mode), sampling)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_ngrams_without_a_drafter_draft_repetitive_text(
    make_cluster: Make, small_pair: Small, plain: Plain, mode: str
) -> None:
    sampling = SamplingParams(max_tokens=60)
    target = small_pair("self", **LOOPING_CONFIG)[0]
    run = make_cluster(None, config=LOOPING_CONFIG, depth=4).run(PROMPT, sampling, mode)
    check_same(target, PROMPT, sampling, run.tokens, plain(target, PROMPT, sampling))
    assert run.timings.draft_n_accepted > 20


@every_sampling
@pytest.mark.parametrize("draft", ["model", None])
def test_ar_text_equals_plain_decoding(make_cluster: Make, check: Check, sampling: str, draft: str | None) -> None:
    run = make_cluster(draft).run(PROMPT, SAMPLINGS[sampling], "ar")
    check(run, sampling)
    assert run.timings.draft_n == 0


@matrix(sampling=SAMPLINGS, schedule=SCHEDULES, full_depth=[False, True])
def test_early_and_late_outcomes_change_no_token(
    make_cluster: Make, check: Check, sampling: str, schedule: Schedule, full_depth: bool
) -> None:
    cluster = make_cluster("model", depth=4, branches=8, schedule=schedule, full_depth=full_depth)
    check(cluster.run(PROMPT, SAMPLINGS[sampling], "ssd"), sampling)


def test_settings_of_the_matrix_exercise_every_path(make_cluster: Make) -> None:
    """Hits, misses and chains of the drafter all occur; otherwise the tests above would prove little."""
    seen: Counter[str] = Counter()
    accepted: Counter[int] = Counter()
    for seed, draft in enumerate(("model", "random"), 2):
        cluster = make_cluster(draft, schedule=MIXED, seed=seed)
        for sampling in SAMPLINGS.values():
            run = cluster.run(PROMPT, sampling, "ssd")
            seen += run.sources
            accepted.update(dict(enumerate(run.timings.accepted_by_position)))
    assert min(seen[source] for source in ("hit", "miss", "drafted")) > 5
    assert all(accepted[position] > 5 for position in range(3))


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_greedy_text_equals_that_of_mlx_lm(make_cluster: Make, small_pair: Small, mode: str) -> None:
    target, sampling = small_pair("self")[0], SamplingParams(max_tokens=80)
    theirs = [token for token, _ in generate_step(mx.array(PROMPT), target.model, max_tokens=sampling.max_tokens)]
    run = make_cluster("model", schedule=MIXED).run(PROMPT, sampling, mode)
    check_same(target, PROMPT, sampling, run.tokens, theirs)


@every_sampling
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_eos_ends_the_text_at_the_same_token(
    make_cluster: Make, small_pair: Small, plain: Plain, sampling, mode
) -> None:
    target, params = small_pair("self")[0], SAMPLINGS[sampling]
    truth = plain(target, PROMPT, params)
    end = truth[LENGTH * 3 // 4]
    run = make_cluster("model", schedule=MIXED).run(PROMPT, params, mode, frozenset({end}))
    check_same(target, PROMPT, params, run.tokens, truth[: truth.index(end) + 1])
    assert run.reason == "eos"


@pytest.mark.parametrize("context", [30, 31, 32])
@pytest.mark.parametrize(("draft", "mode"), [("self", "sd"), ("self", "ssd"), (None, "sd")])
def test_no_chain_reaches_past_the_targets_context(
    make_cluster: Make, small_pair: Small, plain: Plain, draft: str | None, mode: str, context: int
) -> None:
    """No chain is drafted for the last token, so the end of a text does not wait for drafters."""
    config = {} if draft else LOOPING_CONFIG
    known, sampling = small_pair("self", **config)[0], SamplingParams(max_tokens=60)
    short = replace(known, context_length=context)
    run = make_cluster(draft, config=config, target=short, depth=6).run(PROMPT, sampling, mode)
    check_same(known, PROMPT, sampling, run.tokens, plain(known, PROMPT, sampling)[: context - len(PROMPT)])
    assert run.reason == "length" and any(round_.chain for round_ in run.rounds)
    assert all(round_.base_len + len(round_.chain) < context for round_ in run.rounds)


@every_sampling
def test_a_drafter_lost_in_the_middle_changes_no_token(make_cluster: Make, check: Check, sampling: str) -> None:
    cluster = make_cluster("model", schedule=MIXED)
    rounds = iter(range(1000))

    def lose_after_some(*_: object) -> None:
        if next(rounds) == 20:
            cluster.lose_drafter()

    cluster.after_draft = lose_after_some
    run = cluster.run(PROMPT, SAMPLINGS[sampling], "ssd")
    check(run, sampling)
    assert any("lost" in note for note in run.notes)


@matrix(sampling=SAMPLINGS, mode=["sd", "ssd"], vocab_size=[36, 4096])
def test_draft_with_another_vocabulary_size_changes_no_token(
    make_cluster: Make, check: Check, small_pair: Small, sampling: str, mode: str, vocab_size: int
) -> None:
    """A pair that is accepted differs in padding only, but a drafter's tokens are checked in any case."""
    odd = MlxDrafter(small_pair("random", vocab_size=vocab_size)[1])
    run = make_cluster(odd, schedule=MIXED).run(PROMPT, SAMPLINGS[sampling], mode)
    check(run, sampling)
    assert any(f"not among the {vocab_size} tokens" in note for note in run.notes) == (vocab_size == 36)
