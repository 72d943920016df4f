"""A tree that draws its tokens (residual sampling) draws them from the q that it reports.

q is the draft's filtered and truncated distribution with Saguaro's factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import scipy

from outrider.engine.loading import LoadedModel
from outrider.engine.noise import gumbel
from outrider.engine.residual import Draws, draw_tokens
from outrider.engine.tree import Tree
from outrider.protocol.sampling import SamplingParams
from tests.logprobs import filtered_logprobs
from tests.slots import open_tree

PROMPT = [40, 41, 42, 43, 44, 60, 61, 40, 41]
PARAMS = SamplingParams(temp=0.9, seed=6, rule="residual", q_width=8)
PENALISED = replace(PARAMS, top_p=0.9, top_k=30, repetition_penalty=1.4, repetition_context_size=6)
_rng = np.random.default_rng(3)


def scores(rows: int, width: int) -> np.ndarray:
    return _rng.normal(size=(rows, width)).astype(np.float32) * 3


def keys(rows: int) -> tuple[list[int], range]:
    return [9] * rows, range(rows)


# --- one draw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 64, 4096])
@pytest.mark.parametrize(("count", "saguaro"), [(20, 1.0), (20, 0.4), (3000, 0.4), (1, 0.4)])
def test_draw_is_the_best_of_the_tokens_with_noise(count: int, saguaro: float, width: int) -> None:
    rows, (seeds, positions) = scores(6, width), keys(6)
    chosen, drawn = draw_tokens(Draws(1, count, saguaro, 3), seeds, positions, rows)
    assert drawn.ids.shape == (6, min(count, width))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        noise = gumbel(np, seed, [position], width)[0, drawn.ids[row]]
        best = drawn.ids[row][(np.log(drawn.probs[row]) + noise).argmax()]
        assert chosen[row] == best


def test_q_holds_the_likeliest_tokens_normalised() -> None:
    rows = scores(4, 4096)
    _, drawn = draw_tokens(Draws(1, 20, 1.0, 2), *keys(4), rows)
    for row, ids, probs in zip(rows, drawn.ids, drawn.probs, strict=True):
        assert set(ids) == set(np.argsort(-row)[:20])
        expected = np.exp(row[ids] - row.max())
        assert np.allclose(probs, expected / expected.sum(), atol=1e-6)


def test_saguaro_lowers_the_weight_of_cached_tokens_only() -> None:
    rows = scores(4, 4096)
    plain, scaled = (draw_tokens(Draws(1, 20, factor, 3), *keys(4), rows)[1] for factor in (1.0, 0.25))
    for row in range(4):
        weight = np.where(np.isin(plain.ids[row], np.argsort(-rows[row])[:3]), 0.25, 1.0) * plain.probs[row]
        assert np.allclose(scaled.probs[row], weight / weight.sum(), atol=1e-6)


def test_filtered_tokens_have_no_probability() -> None:
    rows = scores(1, 64)
    rows[0, np.argsort(-rows[0])[3:]] = -np.inf
    _, drawn = draw_tokens(Draws(1, 20, 1.0, 2), *keys(1), rows)
    assert (drawn.probs[0] > 0).sum() == 3 and np.isclose(drawn.probs.sum(), 1.0)


@pytest.mark.parametrize("saguaro", [1.0, 0.3])
def test_draws_follow_the_reported_probabilities(saguaro: float) -> None:
    row, count = scores(1, 64), 4000
    chosen, drawn = draw_tokens(Draws(1, 5, saguaro, 2), *keys(count), np.repeat(row, count, axis=0))
    tokens = drawn.ids[0]
    seen, expected = [(chosen == token).sum() for token in tokens], drawn.probs[0].astype(np.float64)
    assert scipy.stats.chisquare(seen, expected * count / expected.sum()).pvalue > 1e-3


# --- in a tree ------------------------------------------------------------------------------------------------------


def drawing_tree(model: LoadedModel, params: SamplingParams = PARAMS, prompt: list[int] = PROMPT) -> Tree:
    return open_tree(model, prompt, params, Draws.of(params, 2))


def feed_chain(tree: Tree, depth: int) -> list[int]:
    """Feeds drawn tokens one after the other; returns a path of `depth` nodes from the root."""
    nodes = [tree.root]
    while len(nodes) < depth:
        nodes += tree.feed(nodes[-1:], [None])
    return nodes


@pytest.mark.parametrize("params", [PARAMS, PENALISED], ids=["plain", "penalised"])
def test_q_of_a_chain_equals_that_of_fresh_forwards(loaded: Callable[..., LoadedModel], params: SamplingParams) -> None:
    model = loaded("llama")
    tree = drawing_tree(model, params)
    nodes = feed_chain(tree, 4)
    chain, q = tree.best(nodes), tree.drawn_from(nodes)
    assert q is not None and q.fits(chain)
    for place in range(4):
        text = [*PROMPT, *chain[:place]]
        row = np.array(filtered_logprobs(model.model(mx.array([text]))[0, -1:], [text], params)[0])
        best = np.argsort(-row)[:8]
        expected = np.exp(row[best] - row.max())
        shares = dict(zip(best.tolist(), (expected / expected.sum()).tolist(), strict=True))
        for token, share in zip(q.ids[place].tolist(), q.probs[place].tolist(), strict=True):
            assert share == pytest.approx(shares.get(token, 0.0), abs=1e-4)


def test_candidates_are_the_likeliest_tokens_regardless_of_seed(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded("llama")
    row = np.array(model.model(mx.array([PROMPT]))[0, -1])
    for seed in (1, 2):
        tree = drawing_tree(model, replace(PARAMS, seed=seed))
        assert [c.token for c in tree.candidates([tree.root], 5)[0]] == np.argsort(-row)[:5].tolist()


def test_draws_do_not_depend_on_how_they_are_fed(loaded: Callable[..., LoadedModel]) -> None:
    """One by one, side by side with others, or again after a commit of what comes before."""
    model = loaded("llama")
    tree = drawing_tree(model)
    chain = tree.best(feed_chain(tree, 4))
    tree = drawing_tree(model)
    others = [c.token for c in tree.candidates([tree.root], 4)[0] if c.token != chain[0]][:3]
    tree.feed([tree.root] * 3, others)
    nodes = [tree.root]
    for _ in range(3):
        fed = tree.feed([nodes[-1], tree.next_node - 1], [None, None])
        nodes.append(fed[0])
    assert tree.best(nodes) == chain
    bonus = others[0]
    first = tree.child(tree.root, bonus)
    assert first is not None
    tree.commit([first])
    again = drawing_tree(model, prompt=[*PROMPT, bonus])
    assert tree.best(feed_chain(tree, 3)) == again.best(feed_chain(again, 3))


def test_chains_that_begin_at_different_nodes_use_different_noise(loaded: Callable[..., LoadedModel]) -> None:
    """Otherwise the tokens of a rejected chain would reveal how the next one is drawn."""
    model = loaded("llama")
    flat = replace(PARAMS, temp=100.0, q_width=200)
    tree = drawing_tree(model, flat)
    nodes = feed_chain(tree, 3)
    given = tree.feed([tree.root], tree.best(nodes[:1]))
    given += tree.feed(given, tree.best(nodes[1:2]))
    assert tree.drawn_from(nodes[1:]).ids.tolist() == tree.drawn_from(given).ids.tolist()
    assert tree.best(nodes[1:]) != tree.best(given)


def test_residual_tree_without_draws_proposes_its_best_tokens(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded("llama")
    tree = open_tree(model, PROMPT, PARAMS)
    nodes = feed_chain(tree, 4)
    assert tree.best(nodes) == [tree.candidates([node], 1)[0][0].token for node in nodes]
    assert tree.drawn_from(nodes) is None
