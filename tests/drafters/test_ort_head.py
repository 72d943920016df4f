"""Heads draft the same tokens by ONNX Runtime as by MLX; unsupported heads and wrong graphs are left to MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.load import load as load_head
from outrider.drafters.heads.load import make_ort_forward
from outrider.drafters.heads.pair_kv_cache import PairKVCache
from outrider.engine.loading import LoadedModel
from outrider.engine.ort import graph
from outrider.engine.ort.forward import OrtForward
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE
from tests.drafters.pair_feeds import PairFeed, outputs
from tests.drafting import HeadText, draft_chains
from tests.target_worker.heads import (
    H,
    last_row_head,
    latent_head,
    markov_llama,
    mtp_head,
    normed_head,
    parallel_token_head,
    random_head,
    recurrent_head,
    token_head,
    unrounded,
    windowed_head,
    write_feature_head,
)

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")

LENGTHS = (20, 7, 33)
LONG = 300  # pairs, which ONNX Runtime reads in pieces


def chains(head: Head, target: LoadedModel, cpu: OrtForward | None, temp: float) -> list[tuple[int, ...]]:
    """The drafts for three texts together, over four rounds in which each text gets one token longer."""
    draws = np.random.default_rng(1)
    own = HeadDrafter(head, target.vocab_size, cpu=cpu)
    texts = [draws.integers(0, 200, length).tolist() for length in LENGTHS]
    drafts = [own.open_draft(SamplingParams(temp=temp, seed=seed)) for seed in range(len(texts))]
    found, sent = list[tuple[int, ...]](), [0] * len(texts)
    for _ in range(4):
        for number, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            rows = draws.standard_normal((len(text) - 1 - sent[number], len(head.points) * H))
            draft.add_features(sent[number], head.fuse(mx.array(rows, mx.float32)))
            sent[number] = len(text) - 1
        updated = [HeadText(draft, text) for draft, text in zip(drafts, texts, strict=True)]
        found += [one.chain for one in draft_chains(updated, [4, 2, 3])]
        texts = [[*text, number] for number, text in enumerate(texts)]
    return found


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize(
    "make", [mtp_head, random_head, normed_head, windowed_head, last_row_head, token_head, parallel_token_head]
)
def test_drafts_by_onnx_runtime_equal_those_by_mlx(
    target: LoadedModel, fed: list[int], make: Callable[[LoadedModel], Head], temp: float
) -> None:
    head = make(target)
    by_ort = chains(head, target, unrounded(head, target), temp)
    assert fed
    fed.clear()
    assert by_ort == chains(head, target, None, temp)
    assert not fed
    assert all(len(chain) >= 2 for chain in by_ort)


@pytest.mark.parametrize("make", [mtp_head, random_head, parallel_token_head])
def test_rounding_to_8_bits_changes_logits_little(target: LoadedModel, make: Callable[[LoadedModel], Any]) -> None:
    head, draws = make(target), np.random.default_rng(2)
    cpu = make_ort_forward(head, target)
    assert cpu is not None and cpu.quantised
    tokens = mx.array(draws.integers(0, 200, LONG))
    features = head.fuse(mx.array(draws.standard_normal((LONG, len(head.points) * H)), mx.float32))
    found = []
    for forward in (None, cpu):
        kv_cache, cost = PairKVCache(head, forward), HeadDrafter(head, target.vocab_size, forward).prompt_cache.cost
        sequence = kv_cache.open()
        _, logits = outputs(kv_cache, [PairFeed(sequence, tokens, features)], [LONG])
        found.append(np.array(logits))
        assert kv_cache.save(sequence, LONG).nbytes == cost.of(LONG)
    known = np.isfinite(found[0])
    assert np.array_equal(known, np.isfinite(found[1]))
    expected, actual = (own[known] for own in found)
    assert np.sqrt(np.square(actual - expected).mean()) < 0.05 * expected.std()


@pytest.mark.parametrize("make", [mtp_head, random_head])
def test_a_quantised_target_lends_its_embedding_and_output_layer(
    tmp_path: Path, make: Callable[[LoadedModel], Head]
) -> None:
    quantised = markov_llama(tmp_path)
    nn.quantize(quantised.model, 32, 4)
    assert make_ort_forward(make(quantised), quantised) is not None


@pytest.mark.parametrize("make", [latent_head, recurrent_head])
def test_other_heads_are_left_to_mlx(target: LoadedModel, make: Callable[[LoadedModel], Head]) -> None:
    assert make_ort_forward(make(target), target) is None


def test_heads_are_left_to_mlx_when_the_cpu_kernels_are_mlx(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "mlx")
    assert make_ort_forward(mtp_head(target), target) is None


@pytest.mark.parametrize("make", [mtp_head, random_head])
def test_graph_with_wrong_logits_is_rejected_at_load(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, make: Callable[[LoadedModel], Head]
) -> None:
    head, linear = make(target), graph.Builder.linear

    def with_values_as_keys(builder: graph.Builder, x: str, layers: Sequence[nn.Module]) -> str:
        q, *others = layers
        return linear(builder, x, [q, *reversed(others)] if len(others) == 2 else layers)

    monkeypatch.setattr(graph.Builder, "linear", with_values_as_keys)
    assert make_ort_forward(head, target) is None


def test_many_pairs_are_read_in_pieces(target: LoadedModel, fed: list[int]) -> None:
    head = mtp_head(target)
    own = HeadDrafter(head, target.vocab_size, cpu=make_ort_forward(head, target))
    draft, text = own.open_draft(SamplingParams()), [5] * (LONG + 1)
    draft.add_features(0, mx.ones((LONG, H)))
    fed.clear()
    draft_chains([HeadText(draft, text)], [3])
    assert sum(fed) == LONG + 2 and max(fed) < LONG and fed[-2:] == [1, 1]


def test_loaded_heads_use_onnx_runtime_and_keep_no_second_copy_of_its_weights(
    target: LoadedModel, fed: list[int], tmp_path: Path
) -> None:
    own = load_head("eagle3", str(write_feature_head(tmp_path / "head", target)), target, lambda stage: None)
    assert fed and own.head.weight_bytes < own.weight_bytes / 2
    draft = own.open_draft(SamplingParams())
    draft.add_features(0, own.head.fuse(mx.ones((3, len(own.head.points) * H))))
    assert len(draft_chains([HeadText(draft, [5, 6, 7, 8])], [3])[0].chain) == 3


def test_head_of_a_multimodal_targets_text_model_uses_onnx_runtime_too(target: LoadedModel) -> None:
    """Its config has the text model's values one level deeper."""
    config = {"model_type": "gemma3", "text_config": target.config, "vocab_size": target.vocab_size}
    assert make_ort_forward(random_head(target), replace(target, config=config)) is not None
