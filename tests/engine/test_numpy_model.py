"""On the host or on MLX, a tree says the same; what the host can't serve it leaves to MLX."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine.blocks import Dense
from outrider.engine.columns import OneRow
from outrider.engine.loading import LoadedModel
from outrider.engine.numpy_model import NumpyRow
from outrider.engine.numpy_net import FAMILIES as SERVED
from outrider.engine.numpy_net import exponentials
from outrider.engine.open_tree import tree_form
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams
from tests.tiny import FAMILIES

Loaded = Callable[..., LoadedModel]
DENSE = [family for family in FAMILIES if family in (*SERVED, "llama3")]


def tree(model: LoadedModel, form: type[NumpyRow] | type[OneRow], tokens: list[int], params: SamplingParams) -> Tree:
    return Tree(form(model), Sampler(params, model.vocab_size, normalised=False), model.context_length, tokens)


@pytest.mark.parametrize("family", DENSE)
def test_the_host_says_what_mlx_says(family: str, loaded: Loaded) -> None:
    """Through forks, a commit, more forks and a gather; also past the first buffer of columns."""
    model, params = loaded(family), SamplingParams(temp=0.8, seed=3)
    prompt = [(7 * i) % 250 for i in range(300)]
    both = [tree(model, form, prompt, params) for form in (NumpyRow, OneRow)]
    for _ in range(3):
        worst, bests = 0.0, []
        for grown in both:
            tips = grown.feed([grown.root] * 9, list(range(20, 29)))
            deeper = grown.feed(tips, [None] * 9)
            bests.append(grown.best([*tips, *deeper]))
            grown.commit([tips[4], deeper[4]])
        host, mlx = (np.array(grown.scores(grown.root)) for grown in both)
        worst = float(np.abs((host - mlx) - (host - mlx).mean()).max())
        assert worst < 1e-4
        assert bests[0] == bests[1]
        assert both[0].column_tokens() == both[1].column_tokens()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in DENSE])
def test_other_families_are_left_to_mlx(family: str, loaded: Loaded) -> None:
    with pytest.raises(ModelError):
        NumpyRow(loaded(family))


@pytest.mark.parametrize("family", DENSE)
def test_small_dense_models_go_to_the_host(family: str, loaded: Loaded) -> None:
    assert tree_form(loaded(family)) is NumpyRow


def test_a_sliding_window_is_left_to_mlx(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama", seed=5)
    monkeypatch.setitem(model.config, "sliding_window", 8)
    monkeypatch.setitem(model.config, "layer_types", ["full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match="sliding"):
        NumpyRow(model)


def test_a_large_model_is_left_to_mlx(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.numpy_net._MOST_BYTES", 1000)
    with pytest.raises(ModelError, match="MiB"):
        NumpyRow(loaded("llama"))


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (3, 100), (9, 1), (10, 64), (40, 129)])
def test_blocks_multiply_like_the_layer(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more rows than a BLAS multiplies without packing: part by part."""
    import mlx.nn as nn

    monkeypatch.setattr("outrider.engine.blocks._SMALL", 4 * 37 * 64)
    layer = nn.Linear(37, width, bias=True)
    x = np.random.default_rng(0).standard_normal((rows, 37)).astype(np.float32)
    assert np.allclose(Dense([layer])(x), np.array(layer(mx.array(x))), atol=1e-5)


def test_no_weight_is_a_number_that_a_cpu_multiplies_slowly() -> None:
    """However far apart scores are, and where columns are hidden; beside the highest such weights are nothing."""
    scores = np.array([[0.0, -70.0, -95.0, -1e30], [3.0, 2.0, -90.0, -100.0]], dtype=np.float32)
    exact = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    weights = exponentials(scores.copy())
    small_values = np.full(4, 1e-8, dtype=np.float32)
    assert (weights * small_values).min() > np.finfo(np.float32).tiny
    assert np.allclose(weights, exact, rtol=1e-6, atol=1e-20)
