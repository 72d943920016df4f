"""A tree's nodes have the model's logits for their texts, through forks, commits and gathers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import scipy

from outrider.drafters.drafter import DrafterFault
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.flat import TokenRope
from outrider.engine.kv_cache import CacheSlot
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, RecurrentKVRows
from outrider.engine.load_checks import find_tree_form, open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.engine.verify import PrefillChunk, VerifyInput, begin_forward
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.forwards import unwrap
from tests.slots import open_slots, open_tree, verify
from tests.tiny import FAMILIES, HYBRIDS

Loaded = Callable[..., LoadedModel]
OWN_ATTENTION = ("gemma2", "gemma4_text")  # not mlx-lm's common one
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temp=0.8, seed=2**33 + 1)
FILTERED = SamplingParams(temp=1.0, seed=9, top_p=0.9, min_p=0.01, top_k=40)
PENALISED = SamplingParams(temp=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((9, 2.0),))
SETTINGS = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED, "penalised": PENALISED}

ROUNDING = 2e-3
"""Sums of float32 depend on the BLAS's kernels (8e-4 was seen with those for AVX2); a wrong mask costs far more."""


def expected(model: LoadedModel, params: SamplingParams, text: Sequence[int]) -> np.ndarray:
    """The scores of what follows `text`, from one plain forward."""
    return expected_together(model, params, [text])[0]


def expected_together(model: LoadedModel, params: SamplingParams, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The same for several texts, padded at their ends to the length of the longest."""
    ends = [len(text) for text in texts]
    logits = model.model(mx.array([[*text, *[0] * (max(ends) - len(text))] for text in texts]))
    rows = logits[mx.arange(len(ends)), mx.array(ends) - 1]
    return np.array(Sampler(params, model.vocab_size).scores(rows, ends, [list(text) for text in texts]))


class TreeUnderTest:
    """A tree, and the text that each of its nodes stands for."""

    def __init__(self, model: LoadedModel, params: SamplingParams, prompt: list[int], seed: str) -> None:
        self.model, self.params, self.draws = model, params, random.Random(seed)
        self.tree = open_tree(model, prompt, params)
        self.texts = {self.tree.root: list(prompt)}
        self.worst = 0.0
        self._expected: dict[tuple[int, ...], np.ndarray] = {}
        self.check(self.tree.root)

    def expected(self, *nodes: int) -> list[np.ndarray]:
        """The scores of what follows the texts of `nodes`; new ones are computed in one forward."""
        texts = [tuple(self.texts[node]) for node in nodes]
        if new := [text for text in dict.fromkeys(texts) if text not in self._expected]:
            self._expected |= zip(new, expected_together(self.model, self.params, new), strict=True)
        return [self._expected[text] for text in texts]

    def check(self, node: int) -> None:
        want, got = self.expected(node)[0], np.array(self.tree.scores(node))
        assert np.array_equal(np.isinf(want), np.isinf(got))
        kept = ~np.isinf(want)
        difference = want[kept] - got[kept]
        self.worst = max(self.worst, float(np.abs(difference - difference.mean()).max()))

    def feed(self, count: int, lazy: float = 0.5, checked: int = 99) -> None:
        first, live = self.tree.next_node, list(self.texts)
        parents, tokens = [], []
        for i in range(count):
            inner = i > 0 and self.draws.random() < 0.3
            parents.append(first + self.draws.randrange(i) if inner else self.draws.choice(live))
            own = not inner and self.draws.random() < lazy
            tokens.append(None if own else self.draws.randrange(self.model.vocab_size))
        nodes = self.tree.feed(parents, tokens)
        assert nodes == list(range(first, first + count))
        for node, parent, token in zip(nodes, parents, tokens, strict=True):
            if token is None:
                token = self.tree.best([parent])[0]
                assert token == int(self.expected(parent)[0].argmax())
            self.texts[node] = [*self.texts[parent], token]
        self.expected(*nodes[-checked:])
        for node in nodes[-checked:]:
            self.check(node)

    def commit(self, longest: int) -> None:
        path, node = [], self.tree.root
        while len(path) < longest:
            text = self.texts[node]
            children = [n for n, t in self.texts.items() if t[:-1] == text and self.tree.child(node, t[-1]) == n]
            if not children:
                break
            node = self.draws.choice(children)
            path.append(node)
        committed = self.texts[node]
        self.tree.commit(path)
        assert self.tree.root == node
        assert self.tree.committed_len == len(committed)
        assert column_tokens(self.tree) == committed
        # Nodes below the new root stay, also the duplicate of a child that was fed twice, which no token leads to.
        self.texts = {n: t for n, t in self.texts.items() if n in self.tree._nodes}
        assert self.texts and all(t[: len(committed)] == committed for t in self.texts.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_node_scores_equal_plain_forwards_in_the_form_of_each_family(loaded: Loaded, family: str) -> None:
    model = replace(loaded(family), cpu=None)
    joins = JointKVRows if family not in OWN_ATTENTION else DenseKVRows
    assert find_tree_form(model) is (RecurrentKVRows if family in HYBRIDS else joins)
    grown = TreeUnderTest(model, SAMPLED, [2 + 11 * i % 250 for i in range(23)], family)
    for _ in range(3):
        for count in (5, 3, 1):
            grown.feed(count)
        grown.commit(3)
    for node in grown.texts:
        grown.check(node)
    assert grown.worst < ROUNDING


@pytest.mark.parametrize("setting", ["greedy", "filtered", "penalised"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_node_scores_equal_plain_forwards_by_the_cpus_kernels(loaded: Loaded, family: str, setting: str) -> None:
    grown = TreeUnderTest(loaded(family), SETTINGS[setting], list(range(40, 60)), family + setting)
    for _ in range(4):
        for count in (4, 3):
            grown.feed(count)
        grown.commit(3)
    assert grown.worst < ROUNDING


@pytest.mark.parametrize("form", [JointKVRows, DenseKVRows, RecurrentKVRows])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_undrafted_text_is_read_in_pieces(
    loaded: Loaded, family: str, form: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected and after accepted drafts, several times; afterwards the tree grows as usual."""
    model = loaded(family)
    if form is not RecurrentKVRows and not model.attention_only:
        pytest.skip("not a form of this model")
    model = model if form is JointKVRows else replace(model, cpu=None)
    grown = TreeUnderTest(model, PENALISED, [2 + 11 * i % 250 for i in range(23)], family)
    grown.tree = open_tree(model, grown.texts[0], PENALISED, kv_rows=form(model))
    for size in ("_ORT_PREFILL_CHUNK_TOKENS", "PREFILL_CHUNK_TOKENS"):
        monkeypatch.setattr(f"outrider.engine.kv_rows.{size}", 20)
    for count, pieces in ((1, 1), (50, 3), (3, 1), (21, 1), (22, 2)):
        grown.feed(4, checked=1)
        grown.commit(1)
        grown.feed(9, checked=1)
        committed = list(grown.texts[grown.tree.root])
        committed += [3 + 7 * (len(committed) + i) % 250 for i in range(count)]
        for number in range(pieces):
            assert number == 0 or not grown.tree.can_grow()
            grown.tree.read(committed[grown.tree.committed_len :])
        grown.texts = {grown.tree.root: committed}
        assert column_tokens(grown.tree) == committed and grown.tree.committed_len == len(committed)
        grown.check(grown.tree.root)
    grown.feed(3)
    assert grown.worst < ROUNDING


def test_scores_stay_exact_while_buffers_grow_and_are_gathered(loaded: Loaded) -> None:
    grown = TreeUnderTest(loaded("llama"), GREEDY, [5], "many")
    while grown.tree.committed_len < 30:
        for count in (40, 12):
            grown.feed(count, lazy=0.0, checked=2)
        grown.commit(4)
    grown.feed(300, checked=20)
    assert grown.worst < ROUNDING


def test_surviving_nodes_keep_their_ancestors_after_a_gather(loaded: Loaded) -> None:
    grown = TreeUnderTest(loaded("llama"), GREEDY, list(range(30, 40)), "survivors")
    tree, fed = grown.tree, {}
    for name, parent, token in [
        *(("", "root", token) for token in range(60, 70)),
        ("a", "root", 70),
        *(("", "root", token) for token in range(80, 90)),
        ("b", "a", 71),
        ("c", "a", 72),
        ("d", "b", 73),
        ("e", "c", 74),
    ]:
        above = tree.root if parent == "root" else fed[parent]
        fed[name] = tree.feed([above], [token])[0]
        grown.texts[fed[name]] = [*grown.texts[above], token]
    tree.commit([fed["a"]])
    for name in "bcde":
        grown.texts |= dict(zip(tree.feed([fed[name]], [9]), [[*grown.texts[fed[name]], 9]], strict=True))
    for node in (n for n in grown.texts if n in tree._nodes):
        grown.check(node)
    assert grown.worst < ROUNDING


def test_recurrent_states_of_committed_tokens_are_freed(loaded: Loaded) -> None:
    """The state after one token may take as much memory as the keys and values of a thousand."""
    tree, used = open_tree(loaded("qwen3_next"), list(range(30, 40)), GREEDY), []
    for token in range(60, 160):
        tree.commit(tree.feed([tree.root], [token]))
        tree.best([tree.root])
        used.append(mx.get_active_memory())
    state = tree.kv_rows.save(tree.committed_len).cost.per_text
    assert state > 0 and max(used) - used[5] < 5 * state


def test_sliding_window_holds_through_forks_and_commits(loaded: Loaded) -> None:
    """A prompt much longer than the window of 32; forks and commits beyond it."""
    grown = TreeUnderTest(loaded("gemma3_text"), GREEDY, [2 + 7 * i % 250 for i in range(90)], "window")
    for _ in range(4):
        grown.feed(6)
        grown.commit(2)
    assert grown.worst < ROUNDING


def test_attention_model_has_the_same_scores_in_recurrent_form(loaded: Loaded) -> None:
    model = replace(loaded("llama"), cpu=None)
    prompt = list(range(30, 50))
    row, rows = (open_tree(model, prompt, GREEDY, kv_rows=form(model)) for form in (DenseKVRows, RecurrentKVRows))
    for tree in (row, rows):
        tree.feed([0, 0, 1, 2, 3], [7, 8, 9, 10, 4])
        tree.commit([1, 3])
        tree.feed([5, 5, 3], [11, None, 12])
    for node in (3, 5, 6, 7, 8):
        np.testing.assert_allclose(np.array(row.scores(node)), np.array(rows.scores(node)), atol=ROUNDING)


def test_lazy_chains_equal_chains_read_step_by_step(loaded: Loaded) -> None:
    model = loaded("llama")
    for params in (GREEDY, SAMPLED):
        lazy, read = (open_tree(model, list(range(30, 50)), params) for _ in range(2))
        branches = [t.feed([t.root] * 4, [60, 61, 62, 63]) for t in (lazy, read)]
        chains: list[list[int]] = [[], [], [], []]
        tips = branches[0]
        for _ in range(4):
            tips = lazy.feed(tips, [None] * 4)
            branches[0] = branches[0] + tips
        tips = branches[1]
        for _ in range(4):
            for chain, token in zip(chains, read.best(tips), strict=True):
                chain.append(token)
            tips = read.feed(tips, [None] * 4)
        found = lazy.best(branches[0])
        assert [[found[4 * depth + i] for depth in range(4)] for i in range(4)] == chains
        for first, chain in zip([60, 61, 62, 63], chains, strict=True):
            text = [*range(30, 50), first]
            for token in chain:
                assert token == int(expected(model, params, text).argmax())
                text.append(token)


def test_lazy_and_known_tokens_can_share_a_feed(loaded: Loaded) -> None:
    model = loaded("llama")
    tree = open_tree(model, list(range(30, 50)), GREEDY)
    a, b = tree.feed([tree.root, tree.root], [60, 61])
    c = tree.feed([a], [None])[0]
    mixed = tree.feed([c, b, a, tree.root, c], [None, None, 9, None, 3])
    fed = [(a, 0, 60), (b, 0, 61), (c, a, None)]
    fed += zip(mixed, [c, b, a, 0, c], [None, None, 9, None, 3], strict=True)
    texts = {tree.root: list(range(30, 50))}
    for node, parent, token in fed:
        own = int(expected(model, GREEDY, texts[parent]).argmax())
        texts[node] = [*texts[parent], own if token is None else token]
        want, got = expected(model, GREEDY, texts[node]), np.array(tree.scores(node))
        np.testing.assert_allclose(got - got.max(), want - want.max(), atol=ROUNDING)
    assert tree.child(c, texts[mixed[0]][-1]) == mixed[0]
    assert tree.child(c, 3) == mixed[4]
    assert tree.child(b, 3) is None


def test_candidates_are_the_best_scores_in_order(loaded: Loaded) -> None:
    model = loaded("llama")
    for params in (GREEDY, SAMPLED, FILTERED):
        tree = open_tree(model, list(range(30, 50)), params)
        nodes = [tree.root, *tree.feed([0, 0, 1], [5, 6, 7])]
        for count in (1, 6, 30, 400):
            for node, found in zip([*nodes, nodes[1]], tree.candidates([*nodes, nodes[1]], count), strict=True):
                scores = np.array(tree.scores(node))
                order = np.argsort(-scores)[: min(count, int(np.isfinite(scores).sum()))]
                assert [c.token for c in found] == order.tolist()
                np.testing.assert_allclose([c.gap for c in found], scores[order[0]] - scores[order], atol=1e-6)
                assert found[0].token == tree.best([node])[0]


def test_model_that_drafts_for_itself_is_always_accepted(loaded: Loaded) -> None:
    """Greedy and sampled: draft and target use the same noise."""
    model = loaded("llama")
    for params in SETTINGS.values():
        prompt = list(range(30, 50))
        slot = open_slots(model, [prompt], [params])[0]
        tree = open_tree(model, prompt, params)
        for _ in range(6):
            nodes = [tree.root]
            for _ in range(3):
                nodes += tree.feed(nodes[-1:], [None])
            chain = tree.best(nodes)
            output = verify(slot, chain)
            assert output.accepted == len(chain)
            last = tree.feed(nodes[-1:], [chain[-1]])
            tree.commit([*nodes[1:], *last, *tree.feed(last, [output.bonus])])
            assert column_tokens(tree) == slot.tokens


def test_room_ends_with_the_context(loaded: Loaded) -> None:
    tree = open_tree(loaded("llama", max_position_embeddings=24), list(range(30, 50)), GREEDY)
    assert tree.room == 4
    tree.commit(tree.feed([tree.root], [5]))
    assert tree.room == 3


def test_nodes_outside_the_tree_are_refused(loaded: Loaded) -> None:
    tree = open_tree(loaded("llama"), [5, 6], GREEDY)
    a, b = tree.feed([0, 0], [1, 2])
    c = tree.feed([b], [3])[0]
    with pytest.raises(InvalidRequest, match="does not follow"):
        tree.commit([c])
    tree.commit([a])
    for wrong in (lambda: tree.feed([b], [1]), lambda: tree.best([c]), lambda: tree.child(99, 1)):
        with pytest.raises(InvalidRequest, match="not in the tree"):
            wrong()


def test_prompt_with_a_token_outside_the_vocabulary_is_refused(loaded: Loaded) -> None:
    with pytest.raises(DrafterFault, match="token 258 is not among"):
        MlxDrafter(loaded("llama")).open([1, 258], GREEDY)


def one_position_a_row(rope: Callable[..., mx.array], x: mx.array, offset: int | mx.array = 0) -> mx.array:
    return rope(x, offset=offset if isinstance(offset, int) or x.shape[0] > 1 else offset[:1])


def test_model_that_ignores_tree_masks_or_positions_is_detected(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mask, no form works. Without a position for each token, the form with a row for each still does."""
    model = replace(loaded("llama", seed=77), cpu=None)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.engine.flat.FlatAttentionMetadata.mask", lambda *_: None)
        with pytest.raises(ModelError, match="choose another"):
            find_tree_form(model)
    for layer in model.model.layers:
        rope = layer.self_attn.rope
        layer.self_attn.rope = partial(one_position_a_row, super(TokenRope, rope).__call__)
    assert find_tree_form(model) is RecurrentKVRows  # one token a row needs no wrapper


TOY = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "scale": 1.5, "bos_token_id": 0}


def exact_joint(model: LoadedModel, prompt: list[int]) -> np.ndarray:
    """P(first, second token) of the model at temperature 1, [64]."""
    texts = mx.array([[*prompt, token] for token in range(8)])
    logp = np.array(model.model(texts))[:, -2:].astype(np.float64)
    p = np.exp(logp) / np.exp(logp).sum(-1, keepdims=True)
    return (p[:, 0].mean(0)[:, None] * p[:, 1]).ravel()


TOY_PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def decoded(loaded: Loaded) -> np.ndarray:
    """The first two tokens of each seed, [500, 2]."""
    model, found = loaded("mistral", **TOY), []
    for first in range(0, 500, 50):
        kv_cache, params = open_kv_cache(model), [SamplingParams(temp=1.0, seed=first + i) for i in range(50)]
        slots = [CacheSlot(model, kv_cache, TOY_PROMPT, one) for one in params]
        begin_forward([], [PrefillChunk(slot, len(TOY_PROMPT) - 1) for slot in slots]).commit()
        outputs = [begin_forward([VerifyInput(slot) for slot in slots]).commit() for _ in range(2)]
        found += [[unwrap(output).bonus for output in of_text] for of_text in zip(*outputs, strict=True)]
    return np.array(found)


def test_two_tokens_follow_the_distribution_of_the_target(loaded: Loaded, decoded: np.ndarray) -> None:
    counts = np.bincount(decoded @ [8, 1], minlength=64)
    wanted = exact_joint(loaded("mistral", **TOY), TOY_PROMPT) * counts.sum()
    assert scipy.stats.chisquare(counts.reshape(8, 8).sum(1), wanted.reshape(8, 8).sum(1)).pvalue > 1e-4
    big = wanted >= 5
    observed, expectation = np.append(counts[big], counts[~big].sum()), np.append(wanted[big], wanted[~big].sum())
    assert scipy.stats.chisquare(observed, expectation * observed.sum() / expectation.sum()).pvalue > 1e-4


@pytest.mark.parametrize("drafter_seed", [0, 5])
def test_two_drafted_tokens_are_those_of_plain_decoding(loaded: Loaded, decoded: np.ndarray, drafter_seed: int) -> None:
    """Whether the draft model is the target itself or an unrelated one."""
    model, drafter = (loaded("mistral", seed=seed, **TOY) for seed in (0, drafter_seed))
    accepted = 0
    for seed, truth in enumerate(decoded[:50].tolist()):
        params = SamplingParams(temp=1.0, seed=seed)
        slot, tree = open_slots(model, [TOY_PROMPT], [params])[0], open_tree(drafter, TOY_PROMPT, params)
        accepted += verify(slot, tree.best([0, tree.feed([0], [None])[0]])).accepted
        if len(slot.tokens) < 5:
            verify(slot)
        assert slot.tokens[3:5] == truth
    assert accepted == 100 if drafter is model else 0 < accepted < 100
