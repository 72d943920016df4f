"""Whatever chain is proposed, the target's text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache
from mlx_lm.models.cache import KVCache as MlxKVCache
from mlx_lm.sample_utils import make_logits_processors

from outrider.engine.cache import RollbackError
from outrider.engine.flat import Segment
from outrider.engine.kv_cache import CacheSlot, Feed, SeparateKVCache
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import SamplingMetadata, apply_penalties
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import one_hot
from tests.forwards import decode_pipelined
from tests.slots import open_slots, verify
from tests.tiny import FAMILIES, HYBRIDS

Loaded = Callable[..., LoadedModel]
PROMPT = [40, 41, 42, 43, 44, 60, 61, 40, 41]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temp=1.0, top_p=0.95, seed=2**40 + 5)
PENALISED = SamplingParams(
    temp=0.8, seed=3, top_k=50, repetition_penalty=1.2, repetition_context_size=7, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias=((50, 1.5),),
)  # fmt: skip
SETTINGS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


def slot_of(model: LoadedModel, params: SamplingParams = GREEDY, prompt: list[int] = PROMPT) -> CacheSlot:
    return open_slots(model, [prompt], [params])[0]


LONGEST = 24


def decoded(model: LoadedModel, params: SamplingParams, count: int, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens of plain decoding: one verify of an empty chain per token."""
    return _decoded(model, params, tuple(prompt), max(count, LONGEST))[:count]


@cache
def _decoded(model: LoadedModel, params: SamplingParams, prompt: tuple[int, ...], count: int) -> list[int]:
    slot = slot_of(model, params, list(prompt))
    return [verify(slot).bonus for _ in range(count)]


def corrupted(truth: list[int], right: int) -> list[int]:
    """`truth` with all tokens after the first `right` replaced by wrong ones."""
    return [token if i < right else (token + 1) % 258 for i, token in enumerate(truth)]


def check_slot(slot: CacheSlot) -> None:
    assert slot.fed < len(slot.tokens)
    if slot.sequence.exact:
        assert slot.fed == len(slot.tokens) - 1


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        *((family, "sampled") for family in sorted(FAMILIES)),
        *((family, setting) for family in ("llama", "gemma3_text", *HYBRIDS) for setting in ("greedy", "penalised")),
    ],
)
def test_verified_text_is_the_decoded_text(loaded: Loaded, family: str, setting: str) -> None:
    model, params = loaded(family), SETTINGS[setting]
    truth = decoded(model, params, LONGEST)
    draws = random.Random(f"{family}{setting}")
    slot, done = slot_of(model, params), 0
    while done < LONGEST - 8:
        length = draws.randrange(7)
        right = draws.choice([0, length, draws.randint(0, length)])
        chain = corrupted(truth[done : done + length], right)
        output = verify(slot, chain)
        assert (output.accepted, output.bonus) == (right, truth[done + right])
        done += right + 1
        assert slot.tokens == PROMPT + truth[:done]
        check_slot(slot)


def test_penalties_copy_only_the_history_that_they_reach(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = slot_of(loaded("llama"), PENALISED, [2 + 7 * i % 250 for i in range(600)])
    seen: list[int] = []

    def check_histories(asked: Sequence[SamplingMetadata], logits: mx.array) -> mx.array:
        histories = [list(history) for own in asked for history in own.histories or ()]
        seen.extend(map(len, histories))
        assert histories == [(slot.tokens + [5, 6, 7][:i])[-slot.sampler.reach :] for i in range(4)]
        return apply_penalties(asked, logits)

    monkeypatch.setattr("outrider.engine.verify.apply_penalties", check_histories)
    verify(slot, [5, 6, 7])
    assert seen == [slot.sampler.reach] * 4


@pytest.mark.parametrize("length", [0, 1, 2, 4, 8])
def test_every_chain_length_and_acceptance_gives_the_decoded_text(loaded: Loaded, length: int) -> None:
    model = loaded("llama")
    truth = decoded(model, SAMPLED, 20)
    for right in range(length + 1):
        slot = slot_of(model, SAMPLED)
        output = verify(slot, corrupted(truth[:length], right))
        assert (output.accepted, output.bonus) == (right, truth[right])
        assert [verify(slot).bonus for _ in range(3)] == truth[right + 1 : right + 4]


def test_right_token_after_a_wrong_one_is_not_accepted(loaded: Loaded) -> None:
    model = loaded("llama")
    truth = decoded(model, GREEDY, 6)
    chain = [truth[0], truth[1] + 1, truth[2], truth[3]]
    assert verify(slot_of(model), chain).accepted == 1


def test_slots_do_not_affect_each_other(loaded: Loaded) -> None:
    model = loaded("llama")
    prompts, params = [PROMPT, PROMPT[:4]], [GREEDY, SAMPLED]
    truths = [decoded(model, p, 12, prompt) for p, prompt in zip(params, prompts, strict=True)]
    slots = open_slots(model, prompts, params)
    for _ in range(3):
        chains = [truth[len(s.tokens) - len(p) :][:2] for truth, s, p in zip(truths, slots, prompts, strict=True)]
        verify(slots[0], chains[0])
        verify(slots[1], corrupted(chains[1], 1))
    for slot, prompt, truth in zip(slots, prompts, truths, strict=True):
        assert slot.tokens[len(prompt) :] == truth[: len(slot.tokens) - len(prompt)]


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2"])
def test_greedy_text_is_mlx_lms(loaded: Loaded, family: str) -> None:
    model = loaded(family)
    theirs = [token for token, _ in generate_step(mx.array(PROMPT), model.model, max_tokens=LONGEST)]
    assert decode_pipelined(slot_of(model), LONGEST) == theirs


def test_penalised_greedy_text_is_mlx_lms(loaded: Loaded) -> None:
    model = loaded("llama")
    params = SamplingParams(repetition_penalty=1.3, repetition_context_size=5, presence_penalty=0.4)
    processors = make_logits_processors(None, 1.3, 5, 0.4)
    theirs = [
        t for t, _ in generate_step(mx.array(PROMPT), model.model, max_tokens=LONGEST, logits_processors=processors)
    ]
    assert theirs != decoded(model, GREEDY, LONGEST)
    assert decoded(model, params, LONGEST) == theirs
    assert decode_pipelined(slot_of(model, params), LONGEST) == theirs


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *HYBRIDS])
@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_running_ahead_and_stopping_does_not_change_the_text(loaded: Loaded, family: str, setting: str) -> None:
    model, params = loaded(family), SETTINGS[setting]
    truth = decoded(model, params, LONGEST)
    slot, done = slot_of(model, params), 0
    for steps in (1, 3, 7, 2):
        assert decode_pipelined(slot, steps) == truth[done : done + steps]
        done += steps
        check_slot(slot)
        chain = corrupted(truth[done : done + 3], 1)
        output = verify(slot, chain)
        assert (output.accepted, output.bonus) == (1, truth[done + 1])
        done += 2
    assert slot.tokens == PROMPT + truth[:done]


@pytest.mark.parametrize("family", ["llama", *HYBRIDS])
def test_running_ahead_feeds_no_unneeded_tokens(loaded: Loaded, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, slot, fed = decoded(loaded(family), GREEDY, 5), slot_of(loaded(family)), 0
    forward = type(slot.kv_cache).forward

    def count_fed(self: SeparateKVCache, feeds: Sequence[Feed]) -> mx.array:
        nonlocal fed
        fed += sum(feed.count for feed in feeds)
        return forward(self, feeds)

    monkeypatch.setattr(type(slot.kv_cache), "forward", count_fed)
    unfed = len(slot.unfed)
    assert decode_pipelined(slot, 5) == truth
    assert fed == unfed + 4
    check_slot(slot)


def test_a_long_prompt_is_read_in_pieces(loaded: Loaded) -> None:
    model = loaded("llama")
    prompt = [2 + i * 7 % 256 for i in range(1025)]
    slot = open_slots(model, [prompt], [GREEDY])[0]
    theirs = [token for token, _ in generate_step(mx.array(prompt), model.model, max_tokens=12)]
    assert [verify(slot).bonus for _ in range(12)] == theirs


@pytest.mark.parametrize("prompt", [[], [1, 258], [-1]])
def test_invalid_prompt_is_refused(loaded: Loaded, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        open_slots(loaded("llama"), [prompt], [GREEDY])


def test_logits_stay_exact_when_the_buffer_grows(loaded: Loaded) -> None:
    model = loaded("llama")
    slot = slot_of(model, GREEDY, [2 + i % 250 for i in range(250)])
    while len(slot.tokens) < 800:
        before = len(slot.tokens)
        verify(slot, list(range(60, 92)))
        assert len(slot.tokens) > before
        slot.tokens += [5] * 130
        check_rows = slot.forward(slot.unfed)[-1]
        whole = model.model(mx.array([slot.tokens]))[0, -1]
        assert mx.allclose(check_rows, whole, atol=1e-4)
        slot.sequence.roll_back(len(slot.tokens) - 1)


def test_impossible_rollback_raises(loaded: Loaded) -> None:
    hybrid = slot_of(loaded("qwen3_5"))
    with pytest.raises(RollbackError, match="no state was marked"):
        hybrid.sequence.roll_back(4)


class Chunked(nn.Module):  # type: ignore[misc]
    """A model whose cache forgets old chunks."""

    def make_cache(self) -> list[ChunkedKVCache]:
        return [ChunkedKVCache(16)]


class Nested(nn.Module):  # type: ignore[misc]
    """A model that has several caches per layer."""

    def make_cache(self) -> list[CacheList]:
        return [CacheList(ArraysCache(1), MlxKVCache())]


def test_a_cache_that_cannot_be_shortened_is_copied_at_a_mark() -> None:
    history = SeparateKVCache(Chunked()).open()
    keys = mx.random.normal((1, 2, 24, 4))
    history.caches[0].update_and_fetch(keys, keys)
    history.length = 24
    with pytest.raises(RollbackError, match="no state was marked"):
        history.roll_back(23)

    history.mark()
    for _ in range(2):  # a mark can be rolled back to more than once
        history.caches[0].maybe_trim_front()
        found, _ = history.caches[0].update_and_fetch(keys[:, :, :5], keys[:, :, :5])
        assert found.shape[2] == 16 + 5
        history.length = 29
        history.roll_back(27)
        assert (history.length, history.caches[0].offset, history.caches[0].start_position) == (24, 24, 0)
        assert mx.array_equal(history.caches[0].keys_and_values()[0], keys)


def test_nested_caches_are_rolled_back() -> None:
    kv_cache = SeparateKVCache(Nested())
    history = kv_cache.open()
    state, keys = history.caches[0].caches
    state[0] = mx.array([1.0])
    history.length = 3
    history.mark()
    state[0] = mx.array([2.0])
    history.length = 6
    history.roll_back(4)
    kv_cache._frame.begin([Segment(history.row, history.length, 2)])
    assert (history.length, keys.offset, state[0].item()) == (3, 3, 1.0)


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("foreign", [258, 10**6, 2**31 - 1])
def test_tokens_outside_the_target_vocabulary_are_rejected(loaded: Loaded, setting: str, foreign: int) -> None:
    """A draft with a wider vocabulary may propose them; an embedding has no row for them."""
    model, params = loaded("llama"), SETTINGS[setting]
    truth = decoded(model, params, 8)
    slot = slot_of(model, params)
    output = verify(slot, [*truth[:2], foreign, *truth[3:5]])
    assert (output.accepted, output.bonus) == (2, truth[2])
    assert [verify(slot).bonus for _ in range(4)] == truth[3:7]


@pytest.mark.parametrize("foreign", [258, 2**31 - 1])
def test_drawn_token_outside_the_target_vocabulary_is_rejected(loaded: Loaded, foreign: int) -> None:
    model = loaded("llama")
    slot = slot_of(model, SamplingParams(temp=1.0, seed=3, rule="residual"))
    output = verify(slot, [foreign, 5], one_hot([foreign, 5]))
    assert output.accepted == 0
    assert slot.tokens == [*PROMPT, output.bonus]
