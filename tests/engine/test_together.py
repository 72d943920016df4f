"""A tree that grows with others equals the tree grown alone, in every form; a failed forward changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider.engine.kv_rows import DenseKVRows, JointKVRows, RecurrentKVRows
from outrider.engine.loading import LoadedModel
from outrider.engine.residual import Draws
from outrider.engine.tree import Tree
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import TreeFeed
from tests.columns import column_tokens
from tests.slots import open_tree

Loaded = Callable[..., LoadedModel]
KINDS = (
    SamplingParams(temp=0.8, seed=3),
    SamplingParams(temp=0.8, seed=4),
    SamplingParams(),
    SamplingParams(temp=0.7, seed=5, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temp=0.9, seed=6, rule="residual"),
    SamplingParams(temp=0.7, seed=8, top_p=0.9, repetition_penalty=1.3),
)
FORMS = [
    ("llama", JointKVRows),
    ("gemma3_text", JointKVRows),
    ("gemma2", DenseKVRows),
    ("qwen3_5", RecurrentKVRows),
]


def open_trees(model: LoadedModel, form: Callable[..., Any]) -> list[Tree]:
    """A tree for each kind of sampling, each with a prompt of its own length."""
    trees = []
    for number, params in enumerate(KINDS):
        draws = Draws.of(params, 2)
        prompt = [2 + (7 + number) * i % 250 for i in range(5 + 13 * number)]
        trees.append(open_tree(model, prompt, params, draws, kv_rows=form(model)))
    return trees


def random_feed(tree: Tree, draws: random.Random) -> TreeFeed:
    """A few new nodes below random ones or below each other; some tokens are given, others the tree's own choice."""
    first, live = tree.next_node, list(tree._nodes)
    parents: list[int] = []
    tokens: list[int | None] = []
    for i in range(draws.randrange(1, 5)):
        inner = i > 0 and draws.random() < 0.3
        parents.append(first + i - 1 if inner else draws.choice(live))
        tokens.append(draws.randrange(2, 250) if inner or draws.random() < 0.5 else None)
    return TreeFeed(parents, tokens)


def check_equal(ours: Tree, theirs: Tree, nodes: Sequence[int]) -> None:
    assert ours.best(nodes) == theirs.best(nodes)
    assert [[c.token for c in found] for found in ours.candidates(nodes, 3)] == [
        [c.token for c in found] for found in theirs.candidates(nodes, 3)
    ]
    assert column_tokens(ours) == column_tokens(theirs)
    for node in nodes:
        want, got = np.array(theirs.scores(node)), np.array(ours.scores(node))
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_tree_grown_with_others_equals_a_tree_grown_separately(
    loaded: Loaded, family: str, form: Callable[..., Any]
) -> None:
    """Not every tree takes part in each forward, and each commits at other times."""
    model, draws = loaded(family), random.Random(family)
    shared, alone = open_trees(model, form), open_trees(model, form)
    for turn in range(4):
        present = [i for i in range(len(KINDS)) if draws.random() < 0.8] or [0]
        feeds = [random_feed(shared[i], draws) for i in present]
        grown = Tree.feed_together([shared[i] for i in present], feeds)
        for i, feed, nodes in zip(present, feeds, grown, strict=True):
            assert alone[i].feed(feed.parents, feed.tokens) == nodes
            check_equal(shared[i], alone[i], nodes)
            if turn % 2 == i % 2:
                below = [node for node, parent in zip(nodes, feed.parents, strict=True) if parent == shared[i].root]
                shared[i].commit(below[:1])
                alone[i].commit(below[:1])
    for ours, theirs in zip(shared, alone, strict=True):
        check_equal(ours, theirs, [ours.root])


@pytest.mark.parametrize(("family", "form"), [("llama", JointKVRows), ("qwen3_5", RecurrentKVRows)])
def test_failed_forward_leaves_every_tree_unchanged(
    loaded: Loaded, family: str, form: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    shared, alone = open_trees(model, form), open_trees(model, form)
    feeds = [TreeFeed([tree.root, tree.root, tree.next_node], [5, None, 6]) for tree in shared]
    with pytest.raises(InvalidRequest, match="not in the tree"):
        Tree.feed_together(shared, [*feeds[:-1], TreeFeed([-7], [1])])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("outrider.engine.tree.make_step", lambda *_, **__: 1 // 0)
        Tree.feed_together(shared, feeds)
    for ours, theirs, feed, nodes in zip(shared, alone, feeds, Tree.feed_together(shared, feeds), strict=True):
        assert theirs.feed(feed.parents, feed.tokens) == nodes
        check_equal(ours, theirs, nodes)
        after = TreeFeed([nodes[0]], [9])
        assert ours.begin(after).new.start == theirs.begin(after).new.start, "a column is lost"
