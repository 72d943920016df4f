"""Texts that share a forward get the same logits as alone, while others join, leave, read prompts and roll back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outrider.engine import flat, hidden_states, load_checks
from outrider.engine.flat import ensure_capacity
from outrider.engine.kv_cache import Feed, FlatKVCache, KVCache, SeparateKVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.engine.verify import PrefillChunk, VerifyInput, begin_forward
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.forwards import unwrap
from tests.slots import open_slots, verify

Loaded = Callable[..., LoadedModel]
TOGETHER = ("llama", "gemma3_text", "qwen3_moe")


@dataclass
class FedText:
    """A text in a KV cache: its sequence there, and the tokens that it was fed."""

    sequence: Any
    tokens: list[int] = field(default_factory=list)


def random_walk(model: LoadedModel, kv_cache: KVCache, steps: int, seed: int = 1) -> float:
    """Feeds, rolls back, opens and closes texts at random.

    Returns the largest difference from the model's own logits.
    """
    draws, texts, worst = random.Random(seed), [FedText(kv_cache.open())], 0.0
    for _ in range(steps):
        if len(texts) < 5 and draws.random() < 0.4:
            texts.append(FedText(kv_cache.open()))
        if len(texts) > 1 and draws.random() < 0.15:
            kv_cache.close(texts.pop(draws.randrange(len(texts))).sequence)
        feeds, fed = [], []
        for text in draws.sample(texts, draws.randint(1, len(texts))):
            if text.sequence.length > 3 and draws.random() < 0.3:
                text.sequence.roll_back(text.sequence.length - draws.randint(1, 3))
                del text.tokens[text.sequence.length :]
            prompt = draws.random() < 0.3
            new = [draws.randrange(2, 250) for _ in range(draws.randint(1, 40 if prompt else 5))]
            feeds.append(Feed(text.sequence, new, 0 if prompt else len(new), prompt))
            text.tokens += new
            fed += [] if prompt else [(text, len(new))]
        logits, row = kv_cache.forward(feeds), 0
        for text, count in fed:
            own = model.model(mx.array([text.tokens]))[0, -count:]
            worst = max(worst, float(mx.abs(logits[row : row + count] - own).max().item()))
            row += count
    return worst


@pytest.mark.parametrize("family", TOGETHER)
def test_texts_that_share_a_forward_get_the_logits_of_separate_forwards(loaded: Loaded, family: str) -> None:
    model = loaded(family)
    kv_cache = open_kv_cache(model)
    assert isinstance(kv_cache, FlatKVCache)
    assert random_walk(model, kv_cache, 16) < 1e-3


def test_cache_layout_of_a_model_is_tried_only_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_kv_cache(loaded("llama"))
    monkeypatch.setattr(load_checks, "batch_logits_match", lambda *_: False)
    again = open_kv_cache(loaded("llama"))
    assert isinstance(again, FlatKVCache) and again is not first and again.trees and not any(again.state())


def test_text_that_sees_the_columns_of_another_is_detected(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that `random_walk` notices a mask that is too wide."""
    model = loaded("llama")
    monkeypatch.setattr(flat.SegmentGroup, "mask", lambda self, window: None)
    assert random_walk(model, FlatKVCache(model.model), 20) > 1e-2


@pytest.mark.parametrize("family", ["qwen3_next", "gemma2"])
def test_models_that_cannot_share_a_forward_get_separate_caches(loaded: Loaded, family: str) -> None:
    assert isinstance(open_kv_cache(loaded(family)), SeparateKVCache)


class RejectsManyTexts(nn.Module):  # type: ignore[misc]
    """A model whose code fails if a forward has tokens of several texts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.inner.layers
        return layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if cache is not None and isinstance(cache[0].offset, mx.array):
            raise TypeError("expected an int as offset")
        logits: mx.array = self.inner(tokens, cache=cache)
        return logits


def test_layout_that_fails_does_not_change_the_next_one(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("llama", seed=91))
    model = replace(model, model=RejectsManyTexts(model.model), cpu=None)
    kv_cache = open_kv_cache(model)
    assert isinstance(kv_cache, SeparateKVCache)
    assert isinstance(model.model.inner.model.embed_tokens, hidden_states.LMHead)  # as the failed one needs it
    assert random_walk(model, kv_cache, 10) < 1e-3


def test_wrapped_layer_exposes_its_weights(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("llama", seed=92)).model
    weight = model.model.embed_tokens.weight
    hidden_states.install_lm_head(model)
    assert isinstance(model.model.embed_tokens, hidden_states.LMHead) and model.model.embed_tokens.weight is weight
    assert isinstance(model.model.embed_tokens, nn.Embedding)


def test_closed_texts_free_their_rows(loaded: Loaded) -> None:
    kv_cache = FlatKVCache(loaded("llama").model)
    sequences = [kv_cache.open() for _ in range(3)]
    kv_cache.forward([Feed(sequence, [5, 6, 7], 1) for sequence in sequences])
    for sequence in sequences:
        kv_cache.close(sequence)
    assert not any(kv_cache.state())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_batched_requests_generate_the_texts_of_single_requests(loaded: Loaded, family: str) -> None:
    model = loaded(family)
    params_list = [
        SamplingParams(), SamplingParams(temp=0.8, seed=1), SamplingParams(temp=0.8, seed=2),
        SamplingParams(temp=1.0, seed=3, top_p=0.9, repetition_penalty=1.2),
    ]  # fmt: skip
    prompts = [[40 + n, 41, 42 + n, *range(50, 50 + 5 * n)] for n in range(len(params_list))]
    truths = []
    for prompt, params in zip(prompts, params_list, strict=True):
        slot = open_slots(model, [prompt], [params])[0]
        truths.append([verify(slot).bonus for _ in range(20)])
    kv_cache, draws = open_kv_cache(model), random.Random(4)
    slots = open_slots(model, prompts, params_list, kv_cache=kv_cache)
    late = open_slots(model, [[9] * 3], [SamplingParams()], kv_cache=kv_cache)[0]
    late.tokens += [7] * 60
    while min(len(slot.tokens) - len(prompt) for slot, prompt in zip(slots, prompts, strict=True)) < 16:
        inputs = []
        for slot, prompt, truth in zip(slots, prompts, truths, strict=True):
            done = len(slot.tokens) - len(prompt)
            if done < 16 and draws.random() < 0.8:
                right, length = draws.randint(0, 3), draws.randint(0, 4)
                chain = [t if i < right else (t + 1) % 250 for i, t in enumerate(truth[done : done + length])]
                inputs.append(VerifyInput(slot, tuple(chain)))
        if inputs:
            chunks = [PrefillChunk(late, 7)] if len(late.unfed) > 8 else []
            for output in begin_forward(inputs, chunks).commit():
                assert not isinstance(output, OutriderError) and unwrap(output)
    for slot, prompt, truth in zip(slots, prompts, truths, strict=True):
        done = slot.tokens[len(prompt) :]
        assert done == truth[: len(done)]


def test_buffer_keeps_its_number_format_as_it_grows() -> None:
    """Appended rows may have another one, as those of the first layers that an early exit computes."""
    grown = ensure_capacity(mx.ones((1, 2, 8, 4), mx.float16), 1, 100, mx.zeros((1, 2, 1, 4), mx.float32))
    assert grown.dtype == mx.float16 and grown.shape[2] >= 100 and float(grown[:, :, :8].sum()) == 64
