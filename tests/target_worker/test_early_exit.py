"""A target's first layers draft for it: chains equal those of an independent forward, and its texts stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.checkpoint import find_target_mismatch
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.early_exit import AdapterConfig, ExitAdapter, ExitDraft, best_speedup
from outrider.drafters.heads.load import load as load_head
from outrider.engine.kv_cache import CacheSlot, FlatKVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft
from outrider.protocol.sampling import SamplingParams
from tests.drafters.experts import gated_mlp, rms
from tests.drafters.mtp_heads import apply_rope
from tests.drafting import HeadText, draft_chains
from tests.slots import verify
from tests.system.links import drafted_chain
from tests.target_worker.heads import LAYERS, H, markov_llama
from tests.target_worker.test_in_process_head import mean_accepted, run, texts
from tests.tiny import VOCAB_SIZE, write_model

Array = np.ndarray[Any, np.dtype[Any]]
Alone = Callable[[float, int], list[list[int]]]
OTHER = "0123456789abcdef-0123456789abcdef"
SIZES = AdapterConfig(2, 8, 64, VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("llama"), "llama", 3))


@pytest.fixture(scope="module")
def alone(target: LoadedModel) -> Alone:
    return cache(lambda temp, requests: texts(run(target, None, temp, requests)))


@pytest.fixture(scope="module")
def drafters(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], HeadDrafter]:
    """`drafters(scale)`: a drafter by the first layers alone if `scale` is 0, else with a random adapter."""

    def make(scale: float) -> HeadDrafter:
        return drafter(target, adapter(tmp_path_factory.mktemp("adapter"), scale) if scale else None)

    return cache(make)


def adapter(folder: Path, scale: float = 0.1, weights: dict[str, Any] | None = None, **other: Any) -> Path:
    """Writes a random adapter. `weights` and `other` settings replace its own; weights that are None are left out."""
    arrays = {key: mx.array(value) for key, value in adapter_weights(scale).items()} | (weights or {})
    config = {"model_type": "early_exit_adapter", **asdict(SIZES), **other}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {key: value for key, value in arrays.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    return folder


def adapter_weights(scale: float) -> dict[str, Array]:
    draws, (rank, size) = np.random.default_rng(4), (SIZES.rank, SIZES.hidden_size)
    shapes = {"norm.weight": (size,), "down.weight": (rank, size), "up.weight": (size, rank)}
    return {key: (scale * draws.standard_normal(shape)).astype(np.float32) for key, shape in shapes.items()}


def drafter(target: LoadedModel, folder: Path | None = None) -> HeadDrafter:
    return load_head("early-exit", str(folder or target.folder), target, lambda stage: None)


def by_numpy(target: LoadedModel, tokens: list[int], layers: int, adapted: Callable[[Array], Array]) -> Array:
    """Logits [T, V] after the first layers of a Llama and `adapted`, computed by numpy."""
    flat = {key.removesuffix(".weight"): np.array(value) for key, value in mx.load(_weights(target)).items()}  # type: ignore[union-attr]
    x = flat["model.embed_tokens"][tokens]
    for number in range(layers):
        at = f"model.layers.{number}."
        y = rms(x, flat[f"{at}input_layernorm"])

        def heads(key: str, count: int, y: Array = y, at: str = at) -> Array:
            z = (y @ flat[f"{at}self_attn.{key}_proj"].T).reshape(len(y), count, 16).swapaxes(0, 1)
            return z if key == "v" else apply_rope(z, 16)

        q, k, v = heads("q", 4), heads("k", 2).repeat(2, axis=0), heads("v", 2).repeat(2, axis=0)
        scores = np.where(np.tri(len(y), dtype=bool), q @ k.swapaxes(1, 2) / 4, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found = (shares / shares.sum(axis=-1, keepdims=True)) @ v
        x = x + found.swapaxes(0, 1).reshape(len(y), -1) @ flat[f"{at}self_attn.o_proj"].T
        x = x + gated_mlp(flat, f"{at}mlp.", rms(x, flat[f"{at}post_attention_layernorm"]))
    logits: Array = rms(adapted(x), flat["model.norm"]) @ flat["model.embed_tokens"].T
    return logits


def _weights(target: LoadedModel) -> str:
    return str(target.folder / "model.safetensors")  # type: ignore[operator]


@pytest.mark.parametrize("scale", [0, 0.1])
def test_chains_equal_an_independent_forward(
    target: LoadedModel, drafters: Callable[[float], HeadDrafter], scale: float
) -> None:
    """Over several rounds of several requests, whatever was drafted before; the texts stay the target's own."""
    own = drafters(scale)
    layers = own.head.exit_layer  # type: ignore[attr-defined]
    kv_cache = open_kv_cache(target)
    slots = [CacheSlot(target, kv_cache, [50 + n, 60, *range(70, 80)], SamplingParams()) for n in range(3)]
    for slot in slots:
        slot.feed_all_but_last()
    drafts = [ExitDraft(own, own.sampler(SamplingParams()), slot.sequence) for slot in slots]  # type: ignore[arg-type]
    draws, weights = np.random.default_rng(9), adapter_weights(scale)

    def adapted(x: Array) -> Array:
        return x + rms(x, weights["norm.weight"]) @ weights["down.weight"].T @ weights["up.weight"].T

    for _ in range(6):
        some = [n for n in range(3) if draws.random() < 0.7]
        chains = [HeadText(drafts[n], slots[n].tokens) for n in some]
        found = draft_chains(chains, [int(draws.integers(1, 5)) for _ in some])
        for n, chain in zip(some, (one.chain for one in found), strict=True):
            truth = by_numpy(target, [*slots[n].tokens, *chain[:-1]], layers, adapted)
            assert tuple(truth[-len(chain) :].argmax(axis=-1)) == chain
            assert slots[n].fed == len(slots[n].tokens) - 1
        for n, slot in enumerate(slots):
            output = verify(slot, found[some.index(n)].chain if n in some and draws.random() < 0.8 else ())
            whole = np.array(target.model(mx.array([slot.tokens[:-1]]))[0, -output.accepted - 1 :])
            assert slot.tokens[-output.accepted - 1 :] == whole.argmax(axis=-1).tolist()


@pytest.mark.parametrize(("scale", "requests", "temp"), [(0, 4, 0.8), (3.0, 4, 0.8), (3.0, 1, 0.0)])
def test_text_with_early_exit_equals_that_of_the_target(
    target: LoadedModel,
    alone: Alone,
    drafters: Callable[[float], HeadDrafter],
    scale: float,
    requests: int,
    temp: float,
) -> None:
    """By the layers alone, and with a random adapter."""
    outcomes = run(target, drafters(scale), temp, requests)
    assert texts(outcomes) == alone(temp, requests)
    assert any(drafted_chain(a) for one in outcomes for a in one)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_first_layer_of_a_target_with_empty_layers_drafts_perfectly(tmp_path: Path, temp: float) -> None:
    """At a temperature, too, since the noise is the target's. A random adapter spoils the drafts, so it is used."""
    markov = markov_llama(tmp_path / "markov")
    own = drafter(markov)
    assert own.head.exit_layer == 1 and "100% of a trial text's tokens agree" in own.note  # type: ignore[attr-defined]
    assert mean_accepted(run(markov, own, temp, 4)) > 2.5
    exit: Any = own.head
    exit.adapter = ExitAdapter(AdapterConfig(1, 8, H, VOCAB_SIZE, LAYERS))
    exit.adapter.up.weight = mx.random.normal((H, 8), key=mx.random.key(1)) * 5
    assert mean_accepted(run(markov, own, temp, 4)) < 1


def test_non_finite_rows_change_no_text(
    target: LoadedModel, alone: Alone, drafters: Callable[[float], HeadDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = drafters(0)
    monkeypatch.setattr(FlatKVCache, "first", lambda self, layers, feeds: mx.full((len(feeds), H), mx.nan))
    assert texts(run(target, own, 0.8, 4)) == alone(0.8, 4)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"hidden_size": 48}, "hidden_size is 48, but this one's is 64"),
        ({"vocab_size": 300}, "vocab_size is 300, but this one's is 258"),
        ({"num_hidden_layers": 32}, "num_hidden_layers is 32, but this one's is 3"),
        ({"exit_layer": 3}, "exits after 3 layers of 3; expected 1 to 2"),
        ({"rank": 9}, r"down.weight is \(8, 64\), expected \(9, 64\)"),
        ({"rank": None}, "expected a head's sizes"),
        ({"model_type": "llama"}, "is not a head of kind early-exit"),
        ({"quantization": {"bits": 4}}, "is quantised"),
        ({"weights": {"up.weight": None}}, "lacks up.weight"),
        ({"weights": {"up.weight": mx.full((64, 8), mx.inf)}}, "NaN or infinite"),
        (
            {"scale": 9.0, "target": OTHER},
            "trained for another target, and never agrees with",
        ),
    ],
)
def test_unusable_adapter_is_refused_with_a_reason(
    target: LoadedModel, tmp_path: Path, other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        drafter(target, adapter(tmp_path, **other))


def test_fingerprint_of_another_target_is_noted(tmp_path: Path) -> None:
    """The same target in another number format has another one, too. So it is only noted, and the trial decides."""
    markov = markov_llama(tmp_path / "markov")
    config = AdapterConfig(2, 8, H, VOCAB_SIZE, LAYERS, target=model_digest(markov.folder))  # type: ignore[arg-type]
    folder, fresh = tmp_path / "adapter", ExitAdapter(config)
    folder.mkdir()
    fresh.up.weight = mx.zeros_like(fresh.up.weight)
    fresh.save_weights(str(folder / "model.safetensors"))
    fields = {"model_type": "early_exit_adapter", **asdict(config)}
    (folder / "config.json").write_text(json.dumps(fields))
    assert not find_target_mismatch(folder, markov.folder)
    (folder / "config.json").write_text(json.dumps({**fields, "target": OTHER}))
    note = drafter(markov, folder).note
    assert "2 of 4 layers and an adapter" in note and "by its fingerprint" in note


GRANITE = {
    "model_type": "granite",
    "logits_scaling": 8.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}


@pytest.mark.parametrize(
    ("family", "config", "sentence"),
    [("qwen3_next", {}, "batch requests"), ("llama", GRANITE, "granite model has more after its layers")],
)
def test_target_that_cannot_exit_early_is_refused(
    tiny_model: Callable[..., Path], family: str, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        drafter(load(tiny_model(family, **config)))


def test_target_not_trained_for_early_exit_is_noted(
    target: LoadedModel, drafters: Callable[[float], HeadDrafter]
) -> None:
    assert "use a model trained for early exit" in drafters(0).note
    with pytest.raises(CannotDraft, match="early-exit needs the target's whole output layer"):
        load_head("early-exit", str(target.folder), target, lambda stage: None, unsharded=False)


def test_exit_layer_is_chosen_by_the_expected_speedup() -> None:
    """A layer that agrees a little more is not worth twice the time."""
    assert best_speedup(0.8, 0.25) > best_speedup(0.85, 0.5) > 1 > best_speedup(0.1, 0.25)
