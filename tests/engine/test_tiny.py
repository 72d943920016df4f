"""The random models of the other tests load, differ where they should, and do not loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from tests.tiny import FAMILIES, VOCAB_SIZE, Pair, write_model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_greedy_text_is_varied(tiny_model: Callable[..., Path], family: str) -> None:
    model, _ = load_model(tiny_model(family))
    tokens = [t for t, _ in generate_step(mx.array([40, 41, 42]), model, max_tokens=60)]
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    assert len(set(grams)) > 0.6 * len(grams)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads(tiny_model: Callable[..., Path], family: str) -> None:
    model, _ = load_model(tiny_model(family))
    logits = model(mx.array([[5, 6, 7, 8]]))
    assert logits.shape == (1, 4, VOCAB_SIZE)
    assert 1.0 < mx.std(logits).item() < 20.0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_seed_gives_the_same_weights(tmp_path: Path, family: str) -> None:
    """Also those that a module draws itself. With other weights in each process, no failure could be reproduced."""
    first, second = (write_model(tmp_path / name, family) / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_text_round_trips(tiny_model: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model("llama")))
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode("héllo\n 日本")) == "héllo\n 日本"


def test_noise_sets_how_often_a_pair_agrees(random_pair: Callable[..., Pair]) -> None:
    text = mx.array([list(range(2, 102))])

    def agreement(pair: Pair) -> float:
        choices = [mx.argmax(load_model(p)[0](text), axis=-1) for p in (pair.target, pair.draft)]
        return (choices[0] == choices[1]).mean().item()

    assert agreement(random_pair(noise=0.0)) == 1.0
    assert 0.2 < agreement(random_pair()) < 0.95
    assert agreement(random_pair(noise=1.0)) < 0.1
