"""Block heads equal an independent forward in every published layout; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.dflash import DFlash, build
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.pair_kv_cache import FeatureKVCache
from outrider.engine.hidden_states import find_backbone, register_forward_hook
from outrider.engine.loading import load
from outrider.engine.noise import gumbel
from outrider.protocol.errors import CannotDraft
from outrider.protocol.sampling import SamplingParams
from tests.drafters.dflash_heads import NumpyHead, write
from tests.drafters.dflash_layouts import LAYOUTS, PLAIN, TAPS, TARGET, H, V
from tests.drafters.pair_feeds import PairFeed, slots
from tests.drafting import HeadText, draft_chains

RNG = np.random.default_rng(3)
EMBEDDING = RNG.standard_normal((V, H)).astype(np.float32)
OUTPUT = (RNG.standard_normal((V, H)) / H**0.5).astype(np.float32)
TEXTS = [RNG.integers(0, 250, 60) for _ in range(2)]
ROWS = [RNG.standard_normal((60, 3 * H)).astype(np.float32) * 3 for _ in TEXTS]


def head_of(folder: Path, target: dict[str, Any] = TARGET, vocab_size: int = V, embed_factor: float = 1.0) -> DFlash:
    own = HeadTarget(
        target,
        vocab_size,
        32768,
        lambda tokens: mx.array(EMBEDDING)[tokens],
        lambda rows: rows @ mx.array(OUTPUT).T,
        embed_factor,
    )
    return build(HeadCheckpoint.read(folder, own))


@pytest.mark.parametrize("name", LAYOUTS)
def test_head_equals_an_independent_forward(tmp_path: Path, name: str) -> None:
    """Blocks of any depth, of one text and of two, after contexts that are read in pieces of any length."""
    layout = LAYOUTS[name]
    head, truth = head_of(write(tmp_path, name)), NumpyHead(layout, EMBEDDING, OUTPUT)
    assert head.points == TAPS and head.depth == layout.depth and head.from_anchor == layout.from_anchor
    contexts, done = FeatureKVCache(head), [0, 0]
    sequences = [contexts.open() for _ in TEXTS]
    for counts, depths in (((40, 3), (5, 2)), ((1, 5), (1, 5)), ((2, 0), (4, 0)), ((0, 9), (0, 3)), ((1, 1), (5, 5))):
        feeds = []
        for n in (n for n in range(2) if counts[n]):
            part = slice(done[n], done[n] + counts[n])
            next_tokens = TEXTS[n][part.start + 1 : part.stop + 1]
            feeds.append(PairFeed(sequences[n], mx.array(next_tokens), head.fuse(mx.array(ROWS[n][part]))))
            done[n] = part.stop
        _, logits = slots(contexts, feeds, [depth for depth in depths if depth])
        found = np.array(logits)
        expected = [
            truth.logits(truth.hidden(truth.fuse(ROWS[n][: done[n]]), TEXTS[n][done[n]], depths[n]))
            for n in range(2)
            if depths[n]
        ]
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-3, atol=1e-3)
        assert [sequence.length for sequence in sequences] == done


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_is_chosen_slot_by_slot_with_the_targets_noise(tmp_path: Path, name: str, temp: float) -> None:
    """The noise is that of the target's token ids and positions; Markov heads see the token chosen before."""
    layout = LAYOUTS[name]
    drafter = HeadDrafter(head_of(write(tmp_path, name)), V)
    truth = NumpyHead(layout, EMBEDDING, OUTPUT)
    drafts = [drafter.open_draft(SamplingParams(temp=temp, seed=5 + n)) for n in range(2)]
    done, depths = [0, 0], [layout.depth, 3]
    for counts in ((30, 7), (1, 3), (4, 1)):
        for n, count in enumerate(counts):
            drafts[n].add_features(done[n], drafter.head.fuse(mx.array(ROWS[n][done[n] : done[n] + count])))
            done[n] += count
        chains = [HeadText(drafts[n], TEXTS[n][: done[n] + 1].tolist()) for n in range(2)]
        found = draft_chains(chains, [n + 3 for n in depths])
        for n, chain in enumerate(one.chain for one in found):
            depth = layout.depth if n == 0 else min(6, layout.depth)
            noise = gumbel(np, 5 + n, range(done[n] + 1, done[n] + 1 + depth), V) if temp else None
            features = truth.fuse(ROWS[n][: done[n]])
            assert list(chain) == truth.chain(features, TEXTS[n][done[n]], depth, noise, temp or 1.0)


def test_markov_links_change_the_reference_chain(tmp_path: Path) -> None:
    """Otherwise the test above would not show that they are applied."""
    for name, layout in LAYOUTS.items():
        truth = NumpyHead(layout, EMBEDDING, OUTPUT)
        features = truth.fuse(ROWS[0][:30])
        plain = truth.logits(truth.hidden(features, TEXTS[0][30], layout.depth)).argmax(axis=-1).tolist()
        linked = layout.markov or layout.convolves
        assert (truth.chain(features, TEXTS[0][30], layout.depth) != plain) == bool(linked), name


@pytest.mark.parametrize("name", ["z-lab", "DeepSpec"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temp=0.8, seed=3, repetition_penalty=1.1)])
def test_candidates_of_each_position_come_best_first(tmp_path: Path, name: str, sampling: SamplingParams) -> None:
    """For a request that asks for them, beside one that does not; both chains are the same."""
    drafter = HeadDrafter(head_of(write(tmp_path, name)), V)
    chains = []
    for least in (0.1, 1.0):
        draft = drafter.open_draft(sampling)
        draft.add_features(0, drafter.head.fuse(mx.array(ROWS[0][:9])))
        chains.append(HeadText(draft, TEXTS[0][:10].tolist(), least))
    wide, plain = draft_chains(chains, [5, 5])
    assert wide.line == plain.chain and plain.parents == () and chains[0].draft._proposed is not None
    for token, point in zip(wide.line, chains[0].draft._proposed.points, strict=True):
        gaps = list(point.gaps)
        assert token not in point.others and len(set(point.others)) == 2
        assert point.own_gap == gaps[0] >= 0.0 and gaps == sorted(gaps)


def test_penalties_are_applied_slot_by_slot(tmp_path: Path) -> None:
    drafter = HeadDrafter(head_of(write(tmp_path, "DeepSpec")), V)
    draft = drafter.open_draft(SamplingParams(repetition_penalty=50.0))
    draft.add_features(0, drafter.head.fuse(mx.array(ROWS[0][:9])))
    chain = draft_chains([HeadText(draft, TEXTS[0][:10].tolist())], [6])[0].chain
    assert len(set(chain) - set(TEXTS[0][:10].tolist())) == 6


def test_a_block_ends_with_the_context(tmp_path: Path) -> None:
    head = head_of(write(tmp_path, "z-lab"))
    head.context_length = 12
    drafter = HeadDrafter(head, V)
    draft = drafter.open_draft(SamplingParams())
    draft.add_features(0, head.fuse(mx.array(ROWS[0][:8])))
    assert len(draft_chains([HeadText(draft, TEXTS[0][:9].tolist())], [9])[0].chain) == 3
    draft.add_features(8, head.fuse(mx.array(ROWS[0][8:11])))
    assert draft_chains([HeadText(draft, TEXTS[0][:12].tolist())], [9])[0].chain == ()


@pytest.mark.parametrize(
    ("name", "config", "target", "sentence"),
    [
        ("z-lab", {}, {**TARGET, "hidden_size": 64}, "hidden_size is 48, but this one's is 64"),
        ("z-lab", {}, {**TARGET, "num_hidden_layers": 6}, r"layers \(1, 3, 6\), but this target has 6"),
        ("z-lab", {}, {**TARGET, "num_hidden_layers": 9}, "num_hidden_layers is 8, but this one's is 9"),
        (
            "z-lab",
            {"dflash_config": {"mask_token_id": 300}},
            TARGET,
            "has mask token 300, but this target has 258 tokens",
        ),
        ("z-lab", {"dflash_config": {}}, TARGET, "missing required field `mask_token_id`"),
        ("z-lab", {"block_size": "wide"}, TARGET, r"a value that can't be used \(invalid literal .*'wide'\)"),
        ("z-lab", {"dflash_config": "wide"}, TARGET, "a value that can't be used"),
        ("z-lab", {"rope_scaling": "wide"}, TARGET, "a value that can't be used"),
        ("z-lab", {"num_target_layers": "eight"}, TARGET, "a value that can't be used"),
        ("z-lab", {"head_dim": -1}, TARGET, "a value that can't be used"),
        ("z-lab", {"hidden_act": "gelu"}, TARGET, r"\(hidden_act 'gelu', not silu or gelu_pytorch_tanh\)"),
        ("z-lab", {"model_type": "gemma4"}, TARGET, "is built of gemma4 layers"),
        ("z-lab", {"block_size": 1}, TARGET, "has blocks of 1 tokens"),
        ("z-lab", {"quantization": {"bits": 4}}, TARGET, "is quantised"),
        ("z-lab", {"architectures": ["LlamaForCausalLM"]}, TARGET, "is not a head of kind dflash"),
        ("DeepSpec", {"markov_head_type": "rnn"}, TARGET, "a Markov head of type 'rnn'"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], target: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        head_of(write(tmp_path, name, config=config), target)


@pytest.mark.parametrize(
    ("name", "other", "sentence"),
    [
        ("z-lab", {"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
        ("z-lab", {"fc.weight": np.ones((H, H))}, r"fc.weight is \(48, 48\), expected \(48, 144\)"),
        ("z-lab", {"fc.scales": np.ones(3)}, "is quantised"),
        ("z-lab", {"norm.weight": np.full(H, np.nan, np.float32)}, "NaN or infinite"),
        ("z-lab", {"layers.0.self_attn.g_proj.weight": np.ones(3)}, "layers.0.self_attn.g_proj.weight, which is not"),
        ("DeepSpec", {"markov_head.markov_w1.weight": None}, "lacks markov_head.markov_w1.weight"),
        ("speculators", {"d2t": np.zeros(3, np.int64)}, r"maps \(3,\) tokens"),
    ],
)
def test_incomplete_or_malformed_head_is_refused(
    tmp_path: Path, name: str, other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CannotDraft, match=sentence):
        head_of(write(tmp_path, name, **other))


def test_domino_heads_are_refused_by_their_tensors(tmp_path: Path) -> None:
    """They are DFlash heads with a recurrent network over the block's tokens."""
    config = {"architectures": ["DominoDraftModel"], "dflash_config": {**PLAIN, "projector_type": "domino"}}
    tensors = {"prefix_gru.weight_hh_l0": np.ones((3, 1)), "embed_proj.0.weight": np.ones((1, 1))}
    with pytest.raises(CannotDraft, match=r"has embed_proj.0.weight, prefix_gru.weight_hh_l0, which is not supported"):
        head_of(write(tmp_path, "z-lab", config=config, **tensors))


def test_head_without_layer_ids_reads_evenly_spaced_layers(tmp_path: Path) -> None:
    config = json.loads((write(tmp_path, "z-lab") / "config.json").read_text())
    del config["dflash_config"]["target_layer_ids"]
    fused = np.ones((H, 2 * H), np.float32)
    other = {"dflash_config": config["dflash_config"], "num_target_layers": 36}
    folder = write(tmp_path, "z-lab", config=other, **{"fc.weight": fused})
    assert head_of(folder, {**TARGET, "num_hidden_layers": 36}).points == (1, 33)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gemma4_text"])
def test_embeddings_are_multiplied_as_in_the_target(tiny_model: Callable[..., Path], family: str) -> None:
    model, seen = load(tiny_model(family)), list[mx.array]()
    register_forward_hook(find_backbone(model.model)[1][0], "test", lambda x, out: seen.append(x))
    tokens = mx.array([[1, 2, 3]])
    model.model(tokens)
    own = HeadTarget.of(model)
    np.testing.assert_allclose(np.array(own.embed(tokens) * own.embed_factor), np.array(seen[0]), rtol=5e-3)


@pytest.mark.parametrize(("name", "factor"), [("z-lab", 7.0), ("speculators", 1.0)])
def test_blocks_embed_tokens_as_in_training(tmp_path: Path, name: str, factor: float) -> None:
    """Gemma's embeddings are multiplied before its first layer. z-lab trains with these, speculators with the table."""
    head, truth = head_of(write(tmp_path, name), embed_factor=7.0), NumpyHead(LAYOUTS[name], EMBEDDING * factor, OUTPUT)
    contexts = FeatureKVCache(head)
    feed = PairFeed(contexts.open(), mx.array(TEXTS[0][1:10]), head.fuse(mx.array(ROWS[0][:9])))
    expected = truth.logits(truth.hidden(truth.fuse(ROWS[0][:9]), TEXTS[0][9], 5))
    np.testing.assert_allclose(np.array(slots(contexts, [feed], [5])[1]), expected, rtol=1e-3, atol=1e-3)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    from tests.drafters.dflash_heads import weights_of

    halves = {key: value.astype(np.float16) for key, value in weights_of(LAYOUTS["z-lab"]).items()}
    head = head_of(write(tmp_path, "z-lab", **halves))
    assert head.fc.weight.dtype == mx.float32
    assert mx.isfinite(head.fuse(mx.full((1, 3 * H), 1e5))).all()
