"""Hidden rows equal a manual loop over the layers, however tokens were fed, and are kept only for a reader."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask

from outrider.engine.hidden_states import AFTER_NORM, BEFORE_NORM, HiddenStateReader, HiddenStates, Point
from outrider.engine.kv_cache import CacheSlot, Feed, FlatKVCache, KVCache, SeparateKVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.verify import PrefillChunk, VerifyInput, begin_forward
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams
from tests.engine.test_kv_cache import FedText
from tests.forwards import unwrap
from tests.slots import open_slots, verify

Loaded = Callable[..., LoadedModel]
POINTS = (0, 2, BEFORE_NORM, AFTER_NORM)
CLOSE = 2e-3  # values are of the order of 1 to 10


def expected_rows(loaded: LoadedModel, tokens: list[int]) -> mx.array:
    """Computes the rows of `POINTS` for a whole text, [N, 4 D], layer by layer and without a cache."""
    model = getattr(loaded.model, "language_model", loaded.model)
    backbone = model.model
    h = backbone.embed_tokens(mx.array([tokens]))
    if loaded.model_type == "gemma3_text":
        h = h * h.shape[-1] ** 0.5
    outputs = []
    for number, layer in enumerate(backbone.layers):
        local = loaded.model_type == "gemma3_text" and number % 2 == 0
        mask = create_attention_mask(h, None, window_size=32 if local else None)
        h = layer(h, None if getattr(layer, "is_linear", False) else mask, None)
        outputs.append(h)
    return mx.concatenate([*(outputs[n] for n in (0, 2)), h, backbone.norm(h)], axis=-1)[0]


def max_error(model: LoadedModel, tokens: list[int], start: int, rows: mx.array) -> float:
    """The largest difference of `rows`, which begin at position `start`, from the expected ones."""
    own = expected_rows(model, tokens[: start + rows.shape[0]])[start:]
    return float(mx.abs(rows - own).max().item())


def tap(model: LoadedModel, kv_cache: KVCache) -> KVCache:
    kv_cache.tap_hidden_states(HiddenStates(model.model, HiddenStateReader(POINTS)))
    return kv_cache


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next", "qwen3_5"])
def test_hidden_rows_equal_a_manual_loop_over_the_layers(loaded: Loaded, family: str) -> None:
    """For prompt chunks and chains of several texts in one forward, after rollbacks, and in a row that was reused."""
    model, draws, worst = loaded(family), random.Random(2), 0.0
    kv_cache = tap(model, open_kv_cache(model))
    texts, read = [FedText(kv_cache.open()) for _ in range(3)], 0
    for step in range(10):
        if step == 6:
            kv_cache.close(texts.pop(0).sequence)
            texts.append(FedText(kv_cache.open()))
        feeds, received = [], []
        for text in draws.sample(texts, draws.randint(1, 3)):
            if text.sequence.length > 3 and draws.random() < 0.5:
                text.sequence.roll_back(text.sequence.length - draws.randint(1, 3))
                del text.tokens[text.sequence.length :]
            text.sequence.mark()
            prompt, start = draws.random() < 0.4, text.sequence.length
            new = [draws.randrange(2, 250) for _ in range(draws.randint(1, 20 if prompt else 5))]
            text.tokens += new
            rows: list[mx.array] = []
            takes = rows.append if draws.random() < 0.8 else None
            feeds.append(Feed(text.sequence, new, 0 if prompt else len(new), prompt, takes))
            received += [(text, start, len(new), rows)] if takes else []
        kv_cache.forward(feeds)
        for text, start, count, rows in received:
            assert [r.shape for r in rows] == [(count, len(POINTS) * 64)]
            worst, read = max(worst, max_error(model, text.tokens, start, rows[0])), read + 1
    assert read > 8 and worst < CLOSE


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_listener_of_a_slot_gets_every_committed_row_once_in_order(loaded: Loaded, family: str) -> None:
    """Through prompt chunks, partly accepted chains and steps begun ahead, beside a slot without a listener."""
    model = loaded(family)
    kv_cache = tap(model, open_kv_cache(model))
    params = SamplingParams(temp=0.8, seed=5)
    prompt = [40, 41, 42, *range(50, 70)]
    truth = truth_of(model, prompt, params, 30)
    slot = CacheSlot(model, kv_cache, prompt, params)
    other = open_slots(model, [[9, 8, 7]], [SamplingParams()], kv_cache=kv_cache)[0]
    received: list[mx.array] = []

    def receive(position: int, rows: mx.array) -> None:
        assert position == sum(r.shape[0] for r in received)
        received.append(rows)

    slot.listener = receive
    begin_forward([VerifyInput(other)], [PrefillChunk(slot, 7)]).commit()
    begin_forward([], [PrefillChunk(slot, len(prompt) - 8)]).commit()
    for accepted in (0, 2, 3, 1, 0, 3):
        done = len(slot.tokens) - len(prompt)
        chain = truth[done : done + 3]
        chain[accepted:] = [(token + 1) % 250 for token in chain[accepted:]]
        output, _ = begin_forward([VerifyInput(slot, tuple(chain)), VerifyInput(other, (5,))]).commit()
        assert unwrap(output).accepted == accepted
    if isinstance(kv_cache, FlatKVCache):
        first = begin_forward([VerifyInput(slot)])
        second = begin_forward([VerifyInput(slot)], after=first)
        first.commit()
        second.commit()
    rows = mx.concatenate(received)
    assert rows.shape[0] == len(slot.tokens) - 1
    assert slot.tokens[len(prompt) :] == truth[: len(slot.tokens) - len(prompt)]
    assert max_error(model, slot.tokens, 0, rows) < CLOSE


def truth_of(model: LoadedModel, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    slot = open_slots(model, [prompt], [params])[0]
    return [verify(slot).bonus for _ in range(count)]


def test_forward_without_a_reader_holds_no_hidden_rows(loaded: Loaded) -> None:
    """Neither during the forward nor after it."""
    model = loaded()
    hidden_states = HiddenStates(model.model, HiddenStateReader(POINTS))
    kv_cache = FlatKVCache(model.model)
    kv_cache.tap_hidden_states(hidden_states)
    sequence, during = kv_cache.open(), []
    inner = hidden_states._record
    hidden_states._record = lambda *row: (inner(*row), during.append(hidden_states._seen))  # type: ignore[method-assign]
    kv_cache.forward([Feed(sequence, [5, 6, 7], 1)])
    assert during and not any(during)
    rows: list[mx.array] = []
    kv_cache.forward([Feed(sequence, [8, 9], 1, hidden=rows.append)])
    assert during[-1] and hidden_states._seen is None
    del during[:]
    gc.collect()
    kept = [value for value in gc.get_referents(hidden_states, hidden_states.__dict__) if isinstance(value, mx.array)]
    assert not kept


def test_fuse_is_applied_to_all_tapped_rows(loaded: Loaded) -> None:
    model = loaded()
    mix = mx.random.normal((len(POINTS) * 64, 5))
    plain, fused = FlatKVCache(model.model), FlatKVCache(model.model)
    tap(model, plain)
    own: list[mx.array] = []
    plain.forward([Feed(plain.open(), [5, 6, 7], 3, hidden=own.append)])
    fused.tap_hidden_states(HiddenStates(model.model, HiddenStateReader(POINTS, lambda rows: rows @ mix)))
    rows: list[mx.array] = []
    fused.forward([Feed(fused.open(), [5, 6, 7], 3, hidden=rows.append)])
    assert rows[0].shape == (3, 5) and mx.allclose(rows[0], own[0] @ mix, atol=1e-3)


def test_each_reader_gets_its_own_rows(loaded: Loaded) -> None:
    model, rows = loaded(), list[mx.array]()
    kv_cache = FlatKVCache(model.model)
    half = HiddenStateReader((2, 0), lambda x: x.astype(mx.float16))
    norm = HiddenStateReader((2, AFTER_NORM), lambda x: x + 1)
    early = HiddenStateReader((BEFORE_NORM,))
    kv_cache.tap_hidden_states(HiddenStates(model.model, half, norm, early))
    texts = [kv_cache.open(), kv_cache.open()]
    kv_cache.forward([Feed(texts[0], [9, 8], 1), Feed(texts[1], [5, 6, 7], 1, hidden=lambda *own: rows.extend(own))])
    first, last, before, after = mx.split(expected_rows(model, [5, 6, 7]), 4, axis=-1)
    assert rows[0].dtype == mx.float16
    expected = mx.concatenate([last, first], axis=-1), mx.concatenate([last, after], axis=-1) + 1, before
    assert all(mx.allclose(own, truth, atol=2e-2) for own, truth in zip(rows, expected, strict=True))


def test_failed_forward_leaves_no_hidden_rows_behind(loaded: Loaded) -> None:
    model = loaded()
    hidden_states = HiddenStates(model.model, HiddenStateReader(POINTS))
    kv_cache = SeparateKVCache(model.model)
    kv_cache.tap_hidden_states(hidden_states)

    def fails(_: mx.array) -> None:
        raise AssertionError("a failed forward must not deliver rows")

    with pytest.raises(ValueError, match="indices"):
        hidden_states.forward(lambda: model.model(mx.zeros((1, 3))), [(2, fails)])
    assert hidden_states._seen is None


def test_tapping_keeps_the_logits_classes_and_weight_names(loaded: Loaded) -> None:
    model = loaded("gemma3_text")
    tokens = mx.array([[5, 6, 7, 8]])
    layer = model.model.model.layers[0]
    kind, names = type(layer), sorted(layer.parameters())
    before = model.model(tokens)
    HiddenStates(model.model, HiddenStateReader(POINTS))
    HiddenStates(model.model, HiddenStateReader(POINTS))  # layers are not wrapped twice
    assert isinstance(layer, kind) and type(layer).__module__ == kind.__module__
    assert sorted(layer.parameters()) == names and type(layer).__mro__[2].__name__ == "TransformerBlock"
    assert mx.array_equal(model.model(tokens), before)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ((3,), "there is no layer 3; expected 0 to 2"),
        ((-1,), "there is no layer -1"),
    ],
)
def test_unknown_layer_is_refused(loaded: Loaded, points: tuple[Point, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        HiddenStates(loaded().model, HiddenStateReader(points))


def test_model_without_a_known_norm_is_refused(loaded: Loaded) -> None:
    class Bare(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

    with pytest.raises(ModelError, match="final norm can't be found"):
        HiddenStates(Bare(), HiddenStateReader((AFTER_NORM,)))
