"""The prompt cache finds the longest prefix, respects its limit, and a text begun from an entry has the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine.flat import FlatAttentionMetadata, FlatCache
from outrider.engine.kv_cache import CacheSlot, Feed
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, RecurrentKVRows
from outrider.engine.load_checks import TreeForm, find_tree_form, measure_tree_cost, open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import MIN_PREFIX_TOKENS, PromptCache, SavedPrefix
from outrider.engine.tree import Tree
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from tests.columns import column_tokens
from tests.slots import open_tree

Loaded = Callable[..., LoadedModel]
COST = KvCost(0, 8)
FORMS: list[tuple[TreeForm, str]] = [
    (JointKVRows, "llama"),
    (DenseKVRows, "llama"),
    (DenseKVRows, "gemma3_text"),
    (RecurrentKVRows, "qwen3_next"),
]


def text(count: int, seed: int = 0) -> list[int]:
    return [(31 * i + 7 * seed) % 250 + 2 for i in range(count)]


def saved(tokens: Sequence[int], whole: bool = False) -> SavedPrefix:
    """A prefix with one byte per token for keys and seven for values; `whole`: with an indivisible state."""
    layers = ((np.zeros((1, len(tokens), 1), np.int8), np.zeros((1, len(tokens), 7), np.int8)),)
    return SavedPrefix(len(tokens), layers, (np.zeros(0, np.int8),) if whole else ())


class RunningText:
    """A running text, whose prefix the cache may copy."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def shareable_tokens(self) -> Sequence[int]:
        return self.tokens

    def save(self, length: int) -> SavedPrefix:
        return saved(self.tokens[:length])


def cached_length(cache: PromptCache, tokens: Sequence[int]) -> int:
    start = cache.find(tokens)
    return start.length if start is not None else 0


def keep(cache: PromptCache, tokens: Sequence[int], whole: bool = False) -> None:
    cache.store(tokens, lambda _: saved(tokens, whole))


def test_longest_common_prefix_is_found_up_to_the_last_token() -> None:
    cache = PromptCache(COST, 1 << 20)
    keep(cache, [*text(40), 1, 1, 1])
    keep(cache, [*text(60), 1, 1, 1])
    assert cached_length(cache, [*text(80)]) == 60
    assert cached_length(cache, [*text(50)]) == 49
    assert cached_length(cache, [*text(MIN_PREFIX_TOKENS - 1), 0, 0]) == 0
    assert cached_length(cache, text(80, seed=1)) == 0
    use = cache.use
    assert (use.entries, use.lookups, use.hits, use.tokens_saved) == (2, 4, 2, 109)


def test_indivisible_state_serves_only_texts_that_begin_with_all_of_it() -> None:
    cache = PromptCache(COST, 1 << 20)
    keep(cache, text(40), whole=True)
    keep(cache, text(60), whole=True)
    assert [cached_length(cache, [*text(n), 0]) for n in (39, 40, 59, 60, 90)] == [0, 40, 40, 60, 60]


def test_longer_text_replaces_the_entry_of_its_prefix() -> None:
    cache = PromptCache(COST, 1 << 20)
    for tokens in (text(40), text(60), text(50)):
        keep(cache, tokens)
    assert (cache.use.entries, cache.use.bytes) == (1, 60 * 8)


def test_least_recently_used_entry_is_evicted_when_room_is_short() -> None:
    cache = PromptCache(COST, 3 * 100 * 8)
    for seed in range(3):
        keep(cache, text(100, seed))
    assert cached_length(cache, [*text(100, 0), 0]) == 100
    keep(cache, text(100, 3))
    assert [cached_length(cache, [*text(100, seed), 0]) for seed in range(4)] == [100, 0, 100, 100]
    running = RunningText([])
    cache.enter(running, 150)
    assert cache.use.entries == 1 and cache.use.bytes == 800
    cache.leave(running)
    keep(cache, text(301, 5))
    assert cache.use.entries == 1, "an entry that never fits evicts nothing"
    cache.set_limit(0)
    assert cache.use.bytes == 0 and cached_length(cache, [*text(100, 3), 0]) == 0


def test_new_chat_does_not_renew_an_old_one_with_the_same_system_prompt() -> None:
    """Their common prefix is found in the entry that was used last."""
    system, chats = text(40), [text(40, seed) for seed in (1, 2, 3)]
    cache = PromptCache(COST, 1 << 20)
    for chat in chats:
        keep(cache, [*system, *chat])
    assert cached_length(cache, [*system, *text(40, 4)]) == 40
    cache.set_limit(2 * COST.of(80))
    assert [cached_length(cache, [*system, *chat, 1]) for chat in chats] == [40, 80, 80]


def test_running_text_lends_its_prefix() -> None:
    cache = PromptCache(COST, 1 << 20)
    keep(cache, text(20))
    cache.enter(running := RunningText(text(50)), 100)
    assert cached_length(cache, [*text(60)]) == 50
    cache.leave(running)
    assert cached_length(cache, [*text(60)]) == 20


def test_cache_without_room_keeps_nothing() -> None:
    cache = PromptCache(COST)
    keep(cache, text(40))
    assert not cache.is_on and cached_length(cache, text(60)) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "qwen3_next"])
def test_text_begun_from_a_copy_has_the_logits_of_a_full_read(loaded: Loaded, family: str) -> None:
    model, prompt = loaded(family, seed=2), text(90)
    kv_cache = open_kv_cache(model)
    others, source = kv_cache.open(), kv_cache.open()
    kv_cache.forward([Feed(others, text(30, 3), 1), Feed(source, prompt[:40], 0, True)])
    kv_cache.forward([Feed(source, prompt[40:70], 1)])
    copy = kv_cache.save(source, 70)
    assert copy.nbytes == copy.cost.of(70) and bool(copy.states) == (not source.exact)
    kv_cache.forward([Feed(source, text(9, 5), 1)])
    kv_cache.close(source)
    lengths = [70] if copy.states else [70, 44, 1]
    for length in lengths:
        begun = kv_cache.open()
        kv_cache.adopt(begun, copy.cut(length))
        logits = kv_cache.forward([Feed(others, [7, 8], 2), Feed(begun, prompt[length:], 2)])
        own = model.model(mx.array([prompt]))[0, -2:]
        assert float(mx.abs(logits[2:] - own).max().item()) < 1e-3
        kv_cache.close(begun)


def test_saved_rows_do_not_keep_their_buffer_alive() -> None:
    cache = FlatCache(FlatAttentionMetadata())
    cache.keys = cache.values = mx.zeros((2, 1, 4096, 16)) + 1
    mx.eval(cache.keys)
    before, held = mx.get_active_memory(), cache.keys.nbytes
    copies = cache.copy_columns(40, row=1)
    mx.eval(copies)
    cache.clear()
    assert mx.get_active_memory() <= before - held + 4 * copies[0].nbytes


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_interrupted_slot_saves_only_committed_tokens(loaded: Loaded, family: str) -> None:
    """After them its row holds a chain whose verify was interrupted."""
    model, prompt = loaded(family, seed=2), text(50)
    kv_cache = open_kv_cache(model)
    slot = CacheSlot(model, kv_cache, prompt, SamplingParams())
    slot.feed_all_but_last()
    slot.sequence.mark()
    slot.forward([prompt[-1], 9, 9, 9])
    copy = slot.save(len(slot.tokens))
    assert copy.length == (50 if slot.sequence.exact else 49)
    begun = CacheSlot(model, kv_cache, [*prompt, 5, 6], SamplingParams())
    begun.begin(copy)
    own = model.model(mx.array([begun.tokens]))[0, -1]
    assert float(mx.abs(begun.forward(begun.unfed)[-1] - own).max().item()) < 1e-3


@pytest.mark.parametrize(("form", "family"), FORMS)
def test_tree_from_a_warm_cache_equals_that_from_a_cold_one(loaded: Loaded, form: TreeForm, family: str) -> None:
    model = loaded(family, seed=1)  # not that of the tests above, whose forwards have changed its output layer
    model = model if form is JointKVRows else replace(model, cpu=None)
    cache = PromptCache(KvCost(0, 1), 1 << 30)

    def opened(tokens: Sequence[int], cache: PromptCache | None) -> Tree:
        return open_tree(model, tokens, SamplingParams(max_tokens=8), cache=cache, kv_rows=form(model))

    first, line = opened(text(40), cache), text(60)
    _, after, _ = first.feed([first.root, first.root, first.root], [9, line[40], 11])
    first.feed([after], [line[41]])
    first.commit([after])
    first.feed([first.root] * 3, [4, 5, 6])
    first.close()
    assert cache.use.entries == 1
    warm, cold = opened(line, cache), opened(line, None)
    assert cache.use.tokens_saved == 41 and column_tokens(warm) == line == column_tokens(cold)
    distance = mx.abs(warm.scores(warm.root) - cold.scores(cold.root)).max()
    assert float(distance.item()) < 1e-3
    if form is not RecurrentKVRows:
        opened([*line[:50], 1, 1], cache)
        assert cache.use.tokens_saved == 41 + 50, "lent by the tree that still grows"


def test_failed_tree_is_not_kept(loaded: Loaded) -> None:
    model = loaded("llama", seed=1)
    cache = PromptCache(measure_tree_cost(model), 1 << 30)
    open_tree(model, text(40), SamplingParams(), cache=cache).close(discard=True)
    assert cache.use.entries == 0 and find_tree_form(model) is JointKVRows


@pytest.mark.parametrize("part", ["save", "keep"])
def test_text_that_can_not_be_copied_ends_without_an_entry(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Such as when memory is short."""
    model = loaded("llama", seed=1)
    cache = PromptCache(measure_tree_cost(model), 1 << 30)
    tree = open_tree(model, text(40), SamplingParams(), cache=cache)
    (drafted,) = tree.feed([tree.root], [5])
    tree.commit([drafted])
    monkeypatch.setattr(tree.kv_rows, part, partial(_fail, RuntimeError("[malloc] out of memory")))
    tree.close()
    assert cache.use.entries == 0 and cache.find(text(40)) is None
    assert isinstance(tree.kv_rows, DenseKVRows) and tree.kv_rows.sequence.row < 0, "its row is free"


def _fail(error: Exception, *_: object) -> None:
    raise error
