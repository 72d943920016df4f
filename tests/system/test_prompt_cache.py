"""A warm prompt cache changes no text, on every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.drafters.drafter import TokenTree
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.system.cluster import MIXED, Cluster
from tests.system.same_text import check_same

SYSTEM = [(7 * i) % 37 + 2 for i in range(40)]
QUESTIONS = ([3, 14, 15, 9], [3, 14, 15, 9], [26, 5, 35, 8, 9])
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=14),
    "sampled": SamplingParams(max_tokens=14, temp=0.8, repetition_penalty=1.2, seed=5),
}
WAYS = [
    ("llama", "ar", "sampled"),
    ("llama", "sd", "sampled"),
    ("llama", "ssd", "greedy"),
    ("llama", "ssd", "sampled"),
    ("llama", "auto", "greedy"),
    ("qwen3_next", "ssd", "sampled"),
]
ROOM = 1 << 26

Make = Callable[..., Cluster]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]


def check_columns(tree: TokenTree, tokens: Sequence[int]) -> None:
    columns = column_tokens(tree)
    assert columns == list(tokens[: len(columns)]) and len(columns) == tree.committed_len


@pytest.mark.parametrize(("family", "mode", "sampling"), WAYS)
def test_every_turn_with_a_prompt_cache_equals_plain_decoding(
    make_cluster: Make, random_pair: Any, loaded: Any, plain: Plain, family: str, mode: str, sampling: str
) -> None:
    """Conversations of two turns with the same beginning. The drafter's columns always have the committed tokens."""
    pair, params = random_pair(family), SAMPLINGS[sampling]
    target, drafter = loaded(pair.target), MlxDrafter(loaded(pair.draft))
    cluster = make_cluster(drafter, target=target, schedule=MIXED, after_draft=check_columns, kv_memory=ROOM)
    for number, question in enumerate(QUESTIONS if target.attention_only else QUESTIONS[:1]):
        prompt = SYSTEM + question
        first = cluster.run(prompt, params, mode)
        check_same(target, prompt, params, first.tokens, plain(target, prompt, params))
        again = [*prompt, *first.tokens, 4, 7, number + 2]
        second = cluster.run(again, params, mode)
        check_same(target, again, params, second.tokens, plain(target, again, params))
        times = second.timings
        assert times.cache_n + times.prompt_n == len(again)
        assert times.cache_n >= len(prompt) + (12 if target.attention_only else 0), "the first turn was read again"
        if target.attention_only:
            assert first.timings.cache_n >= (len(SYSTEM) if number else 0), "the common beginning was read again"
    use = drafter.prompt_cache.use
    assert mode == "ar" or (use.hits == use.lookups - 1 and use.tokens_saved > len(SYSTEM) * use.hits)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_in_process_drafter_with_a_prompt_cache_changes_no_text(
    make_cluster: Make, small_pair: Any, plain: Plain, sampling: str
) -> None:
    target, params, prompt = small_pair("self")[0], SAMPLINGS[sampling], [*SYSTEM, 3, 14]
    cluster = make_cluster(None, colocated="model", kv_memory=ROOM)
    for tokens in (prompt, prompt, [*prompt, *plain(target, prompt, params), 7]):
        run = cluster.run(tokens, params, "sd")
        check_same(target, tokens, params, run.tokens, plain(target, tokens, params))
    assert run.timings.cache_n > len(prompt)


def test_warm_prompt_cache_changes_no_residual_text(make_cluster: Make) -> None:
    """With full branches a residual text is reproducible, so the cache may not change it either."""
    params = SamplingParams(max_tokens=14, temp=0.9, seed=3, rule="residual")
    prompt = [*SYSTEM, 3, 14]
    cold = make_cluster("model", full_depth=True, ngrams=False).run(prompt, params, "ssd")
    warm = make_cluster("model", full_depth=True, ngrams=False, kv_memory=ROOM)
    assert warm.run(prompt, params, "ssd").tokens == cold.tokens
    again = warm.run(prompt, params, "ssd")
    assert again.timings.cache_n == len(prompt) - 1 and again.tokens == cold.tokens
