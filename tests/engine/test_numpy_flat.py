"""Several texts by numpy say what MLX says of each; who is alone, reads long pieces or is tapped stays with MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import numpy_flat
from outrider.engine.loading import LoadedModel
from outrider.engine.numpy_flat import MOST_ROWS, NumpyFlat
from outrider.engine.numpy_net import net_of
from outrider.engine.open_texts import open_texts
from outrider.engine.taps import TapPoints, Taps
from outrider.engine.texts import Feed, FlatTexts
from outrider.protocol.errors import ModelError
from tests.engine.test_texts import walk

Loaded = Callable[..., LoadedModel]
LENGTHS = (30, 7, 19)


class Counted(NumpyFlat):
    """Counts its forwards."""

    made = 0

    def forward(self, *fed: Any) -> mx.array:
        self.made += 1
        return super().forward(*fed)


def opened(model: LoadedModel, texts: FlatTexts) -> list[Any]:
    """Texts of unlike length, each read alone."""
    places = [texts.open() for _ in LENGTHS]
    for number, (place, length) in enumerate(zip(places, LENGTHS, strict=True)):
        texts.forward([Feed(place, told(number, length), 0, True)])
    return places


def told(number: int, length: int) -> list[int]:
    return [(7 * i + 31 * number) % 250 for i in range(length)]


def by_text(texts: FlatTexts, places: Sequence[Any], counts: Sequence[int]) -> mx.array:
    feeds = [Feed(place, told(9, count), count) for place, count in zip(places, counts, strict=True)]
    return texts.forward(feeds)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_ragged_chains_have_the_logits_that_mlx_gives_them(loaded: Loaded, family: str) -> None:
    model, found = loaded(family), []
    for numpy in (None, NumpyFlat(model)):
        texts = FlatTexts(model.model, numpy=numpy)
        found.append(np.array(by_text(texts, opened(model, texts), (5, 1, 3))))
    assert np.abs(found[0] - found[1]).max() < 1e-4
    assert not np.array_equal(*found)  # else one of them was not asked


def test_only_few_tokens_go_to_numpy(loaded: Loaded) -> None:
    model = loaded("llama")
    counted = Counted(model)
    texts = FlatTexts(model.model, numpy=counted)
    places = opened(model, texts)
    begun = counted.made
    by_text(texts, places, (MOST_ROWS - 2, 1, 1))
    assert counted.made == begun + 1
    by_text(texts, places, (MOST_ROWS - 1, 1, 1))
    assert counted.made == begun + 1
    by_text(texts, places[:1], (4,))
    assert counted.made == begun + 2


@pytest.mark.parametrize("points", [TapPoints((1,)), TapPoints(before_norm=True), TapPoints((1,), after_norm=True)])
def test_the_norm_is_made_for_a_reader_of_it_alone(loaded: Loaded, points: TapPoints) -> None:
    model = loaded("llama")
    net, made = net_of(model), []
    texts = FlatTexts(model.model, numpy=NumpyFlat(model))
    texts.tap(Taps(model.model, points))
    places, norm, heard = opened(model, texts), net.norm, []
    try:
        net.norm = lambda rows: made.append(len(rows)) or norm(rows)
        texts.forward([Feed(place, told(9, 3), 3, hidden=heard.append) for place in places])
    finally:
        net.norm = norm
    assert made == [9] * (1 + points.after_norm) and len(heard) == len(places)


def test_a_text_that_sees_what_comes_after_it_is_caught(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """At load, and by the walk of every other test."""
    model = loaded("llama", seed=8)  # of which nothing is known yet
    monkeypatch.setattr(numpy_flat, "hidden", lambda seen: None)
    assert walk(model, FlatTexts(model.model, numpy=NumpyFlat(model)), 20) > 1e-2
    texts = open_texts(model)
    assert isinstance(texts, FlatTexts)
    assert texts.is_lazy


def test_no_step_is_begun_ahead_where_it_would_be_made_at_once(loaded: Loaded) -> None:
    texts = open_texts(loaded("llama"))
    assert not texts.open().marks_freely


def test_what_is_saved_stays_when_its_place_is_written_again(loaded: Loaded) -> None:
    """Numpy writes in place: nothing may share a text's columns."""
    model = loaded("llama")
    texts = FlatTexts(model.model, numpy=NumpyFlat(model))
    places = opened(model, texts)
    saved = texts.save(places[0], LENGTHS[0])
    before = [np.array(keys) for keys, _ in saved.layers]
    places[0].roll_back(3)
    by_text(texts, places, (20, 1, 1))
    mx.eval(texts.state())
    assert all(np.array_equal(old, keys) for old, (keys, _) in zip(before, saved.layers, strict=True))


def test_a_target_in_half_precision_is_left_to_mlx(loaded: Loaded) -> None:
    model = loaded("llama", seed=7)
    model.model.set_dtype(mx.float16)
    with pytest.raises(ModelError, match="float32"):
        NumpyFlat(model)
