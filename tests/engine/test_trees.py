"""Whatever tree is verified, the target's text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from outrider.engine.flat import NodeSegment, Segment
from outrider.engine.kv_cache import CacheSlot, FlatKVCache
from outrider.engine.load_checks import logits_match, open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.verify import PrefillChunk, VerifyInput, begin_forward
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import accepted_path, chain_parents, first_branch, node_depths, tree_fault
from tests.engine.test_verify import LONGEST, PENALISED, PROMPT, SETTINGS, corrupted, decoded
from tests.slots import open_slots, verify

Loaded = Callable[..., LoadedModel]
GREEDY = SamplingParams()
FLAT = ("llama", "llama3", "qwen3", "qwen3_moe", "gemma3_text", "phi3")


def slots_of(model: LoadedModel, params: Sequence[SamplingParams], prompts: Sequence[list[int]]) -> list[CacheSlot]:
    return open_slots(model, prompts, params, kv_cache=open_kv_cache(model))


def random_tree(truth: Sequence[int], right: int, draws: random.Random, size: int) -> tuple[list[int], list[int]]:
    """A random tree of `size` nodes with a path of exactly the first `right` tokens of `truth`."""
    tokens: list[int] = []
    parents: list[int] = []
    true = [-1]  # the nodes of that path
    while len(tokens) < size:
        todo = right + 1 - len(true)
        if todo and (todo >= size - len(tokens) or draws.random() < 0.4):
            parent, token = true[-1], truth[len(true) - 1]
            true.append(len(tokens))
        else:
            parent = draws.randrange(-1, len(tokens))
            token = draws.choice([draws.randrange(258), 0, 258, 2**31 - 1])
            if parent in true and token == truth[true.index(parent)]:
                continue
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


def check_keys_and_values(model: LoadedModel, slot: CacheSlot) -> None:
    """Checks that the slot's keys and values are those of a fresh prefill."""
    assert slot.fed == len(slot.tokens) - 1
    (fresh,) = slots_of(model, [GREEDY], [slot.tokens])
    for (keys, values), (own_keys, own_values) in zip(
        fresh.save(slot.fed).layers, slot.save(slot.fed).layers, strict=True
    ):
        assert mx.allclose(keys, own_keys, atol=1e-4) and mx.allclose(values, own_values, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        *((family, "sampled") for family in FLAT),
        *((family, setting) for family in ("llama", "gemma3_text") for setting in ("greedy", "penalised")),
    ],
)
def test_text_verified_by_trees_is_the_decoded_text(loaded: Loaded, family: str, setting: str) -> None:
    model, params = loaded(family), SETTINGS[setting]
    truth = decoded(model, params, LONGEST)
    draws = random.Random(f"{family}{setting}")
    (slot,), done = slots_of(model, [params], [PROMPT]), 0
    while done < LONGEST - 8:
        size = draws.randrange(1, 12)
        right = draws.randint(0, min(size, 6))
        tokens, parents = random_tree(truth[done:], right, draws, size)
        output = verify(slot, tokens, parents=parents)
        assert (output.accepted, output.bonus) == (right, truth[done + right])
        assert [tokens[node] for node in output.nodes] == truth[done : done + right]
        done += right + 1
        assert slot.tokens == PROMPT + truth[:done]
    check_keys_and_values(model, slot)


def test_trees_chains_steps_and_prompts_share_a_forward(loaded: Loaded) -> None:
    model, draws = loaded("llama"), random.Random(7)
    params = [SETTINGS["sampled"], GREEDY, PENALISED, SETTINGS["sampled"]]
    prompts = [PROMPT, PROMPT[:4], [9, *PROMPT, 3], [5, 6]]
    truths = [decoded(model, own, 48, prompt) for own, prompt in zip(params, prompts, strict=True)]
    kv_cache = open_kv_cache(model)
    slots = open_slots(model, prompts, params, kv_cache=kv_cache)
    reader = CacheSlot(model, kv_cache, [2 + i % 250 for i in range(90)], GREEDY)
    while min(len(slot.tokens) - len(prompt) for slot, prompt in zip(slots, prompts, strict=True)) < 15:
        inputs, rights = [], []
        for number, (slot, prompt, truth) in enumerate(zip(slots, prompts, truths, strict=True)):
            rest = truth[len(slot.tokens) - len(prompt) :]
            if number == 3:
                inputs.append(VerifyInput(slot, tuple(rest[:2])))
                rights.append(min(2, len(rest)))
                continue
            right = draws.randint(0, min(3, len(rest) - 1))
            tokens, parents = random_tree(rest, right, draws, draws.randrange(max(right, 1), 9))
            inputs.append(VerifyInput(slot, tuple(tokens), parents=tuple(parents)))
            rights.append(right)
        unread = len(reader.unfed) - 1
        outputs = begin_forward(inputs, [PrefillChunk(reader, min(unread, 20))] if unread else []).commit()
        for output, right in zip(outputs, rights, strict=True):
            assert not isinstance(output, OutriderError) and output.accepted == right
    for slot, prompt, truth in zip(slots, prompts, truths, strict=True):
        assert slot.tokens[len(prompt) :] == truth[: len(slot.tokens) - len(prompt)]
        check_keys_and_values(model, slot)


def test_prompt_read_beside_a_tree_has_correct_keys_and_values(loaded: Loaded) -> None:
    model = loaded("gemma3_text")
    kv_cache = open_kv_cache(model)
    (slot,) = open_slots(model, [PROMPT], [GREEDY], kv_cache=kv_cache)
    reader = CacheSlot(model, kv_cache, [2 + i % 250 for i in range(90)], GREEDY)
    truth = decoded(model, GREEDY, 30)
    for _ in range(3):
        rest = truth[len(slot.tokens) - len(PROMPT) :]
        begin_forward(
            [VerifyInput(slot, (9, *rest[:4]), parents=(-1, -1, 1, 2, 3))], [PrefillChunk(reader, 29)]
        ).commit()
    assert slot.tokens == PROMPT + truth[:15]
    reader.feed_all_but_last()
    check_keys_and_values(model, slot)
    check_keys_and_values(model, reader)


def test_listener_gets_the_rows_of_a_later_branch_in_order(loaded: Loaded) -> None:
    from outrider.engine.hidden_states import AFTER_NORM, HiddenStateReader, HiddenStates

    model = loaded("qwen3", 3)
    truth = decoded(model, GREEDY, 12)

    def rows(*inputs: tuple[list[int], list[int]]) -> mx.array:
        kv_cache = open_kv_cache(model)
        reader = HiddenStateReader((1, AFTER_NORM))
        kv_cache.tap_hidden_states(HiddenStates(model.model, reader))
        received: list[mx.array] = []
        (slot,) = open_slots(model, [PROMPT], [GREEDY], kv_cache=kv_cache)
        slot.listener = lambda place, found: received.append(found)
        for tokens, parents in inputs:
            verify(slot, tokens, parents=parents)
        return mx.concatenate(received)[:6]

    plain = rows(*[([], [])] * 6)
    in_tree = rows(([7, truth[0], 9, truth[1]], [-1, -1, 0, 1]), ([truth[3], 8, truth[4]], [-1, -1, 0]))
    assert mx.allclose(plain, in_tree, atol=1e-4)


def test_log_probabilities_are_those_of_the_accepted_branch(loaded: Loaded) -> None:
    model, params = loaded("llama"), SamplingParams(logprobs=2)
    truth = decoded(model, params, 6)
    (plain, slot) = slots_of(model, [params, params], [PROMPT, PROMPT])
    alone = [verify(plain).logprobs for _ in range(3)]
    found = verify(slot, [9, truth[0], 8, truth[1]], parents=[-1, -1, 0, 1]).logprobs
    assert found is not None and found.ids.shape[0] == 3
    for row, one in enumerate(alone):
        assert one is not None and (one.ids[0] == found.ids[row]).all()


def test_tree_accepts_at_least_as_much_as_its_first_chain(loaded: Loaded) -> None:
    model, draws = loaded("llama"), random.Random(5)
    params = SETTINGS["sampled"]
    truth = decoded(model, params, 12)
    for _ in range(12):
        right = draws.randint(0, 4)
        tokens, parents = random_tree(truth, right, draws, 9)
        chain = first_branch(parents)
        (slot, other) = slots_of(model, [params, params], [PROMPT, PROMPT])
        assert verify(slot, tokens, parents=parents).accepted >= verify(other, [tokens[n] for n in chain]).accepted


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([4, 5], [-1], "2 tokens has 1 parents"),
        ([4, 5], [1, -1], "node 0 of a tree follows node 1"),
        ([4, 5], [-1, -2], "expected an earlier node"),
        ([4, 4], [-1, -1], "follows node -1 of a tree twice"),
    ],
)
def test_invalid_tree_is_refused(loaded: Loaded, tokens: list[int], parents: list[int], words: str) -> None:
    (slot,) = slots_of(loaded("llama"), [GREEDY], [PROMPT])
    with pytest.raises(InvalidRequest, match=words):
        verify(slot, tokens, parents=parents)
    truth = decoded(loaded("llama"), GREEDY, 2)
    assert [verify(slot).bonus for _ in range(2)] == truth


def test_residual_request_refuses_trees(loaded: Loaded) -> None:
    (slot,) = slots_of(loaded("llama"), [SamplingParams(temp=1.0, seed=3, rule="residual")], [PROMPT])
    with pytest.raises(InvalidRequest, match="expected a chain"):
        verify(slot, [4, 5], parents=[-1, -1])


def test_target_without_tree_support_refuses_trees(loaded: Loaded) -> None:
    model = loaded("llama")
    (slot,) = open_slots(model, [PROMPT], [GREEDY], kv_cache=FlatKVCache(model.model, trees=False))
    with pytest.raises(InvalidRequest, match="can't verify a tree"):
        verify(slot, [4, 5], parents=[-1, -1])
    assert not open_kv_cache(loaded("qwen3_5")).trees


def test_load_check_detects_wrong_positions_and_wrong_masks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh() -> LoadedModel:
        return replace(loaded("llama"), cpu=None)

    assert open_kv_cache(fresh()).trees
    for name in ("positions", "seen"):
        with monkeypatch.context() as patch:
            patch.setattr(NodeSegment, name, getattr(Segment, name))
            kv_cache = open_kv_cache(fresh())
            assert isinstance(kv_cache, FlatKVCache) and not kv_cache.trees


def test_depths_first_branch_and_accepted_path_follow_from_the_parents() -> None:
    parents = (-1, 0, 0, -1, 2)
    assert node_depths(parents) == [0, 1, 1, 0, 2]
    assert first_branch(parents) == [0, 1] and first_branch(()) == []
    assert accepted_path([5, 6, 7, 8, 9], parents, [5, 7, 0, 9, 0, 0]) == (0, 2, 4)
    assert accepted_path([5, 6, 7, 8, 9], parents, [8, 7, 0, 9, 0, 0]) == (3,)
    assert tree_fault([5, 6, 7, 8, 9], parents) == "" and chain_parents(3) == (-1, 0, 1)


def test_tree_of_wrong_tokens_accepts_nothing(loaded: Loaded) -> None:
    truth = decoded(loaded("llama"), GREEDY, 4)
    (slot,) = slots_of(loaded("llama"), [GREEDY], [PROMPT])
    output = verify(slot, corrupted(truth[:3], 0), parents=[-1, 0, 0])
    assert (output.accepted, output.path, output.bonus) == (0, None, truth[0])


def test_logits_are_compared_with_those_of_a_plain_forward(loaded: Loaded) -> None:
    for model in (loaded("llama"), replace(loaded("llama"), cpu=None)):
        own = model.model(mx.array([PROMPT]))[0, -3:]
        assert logits_match(model, PROMPT, own) and logits_match(model, PROMPT, own[-1:])
        for row in range(3):
            assert not logits_match(model, PROMPT, own.at[row].add(1e-3))
        assert not logits_match(model, PROMPT[:-1], own)
