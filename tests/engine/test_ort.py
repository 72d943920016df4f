"""ONNX Runtime on a CPU has MLX's logits and, with 8-bit activations, the same bits however a text is fed."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_model

from outrider.engine.flat import FlatAttentionMetadata, FlatCache, Segment
from outrider.engine.hidden_states import AFTER_NORM, BEFORE_NORM, HiddenStateReader, HiddenStates, Point
from outrider.engine.kv_cache import Feed, FlatKVCache
from outrider.engine.kv_rows import DenseKVRows, JointKVRows
from outrider.engine.load_checks import find_tree_form, open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.engine.ort import check, graph
from outrider.engine.ort.forward import OrtForward
from outrider.engine.ort.graph import Affine, build
from outrider.engine.ort.layers import DecoderLayers, Layout
from outrider.engine.tree import Tree
from outrider.protocol.errors import ModelError
from outrider.protocol.process import cpu_flags
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import TreeFeed
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE
from tests.columns import column_tokens
from tests.slots import open_tree
from tests.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")

Loaded = Callable[..., LoadedModel]
Quantised = Callable[..., LoadedModel]
SUPPORTED = [
    "llama", "llama3", "mistral", "smollm3", "granite", "qwen2", "qwen3", "phi3", "gemma3_text",
    "internlm3", "mimo", "nanbeige", "seed_oss",
]  # fmt: skip
NATIVE = [(4, 32), (4, 64), (4, 128), (5, 32), (8, 32)]
sums_fit = pytest.mark.skipif(
    platform.machine() == "x86_64" and not any("vnni" in flag or "amx" in flag for flag in cpu_flags()),
    reason="sums of 8-bit products saturate on this CPU, which rounds in groups only",
)
PER_TOKEN = pytest.param(True, marks=sums_fit)
SETTINGS = [*((bits, group, "native") for bits, group in NATIVE), (4, 32, "uneven")]


@pytest.fixture(scope="session")
def quantised(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """`quantised(family, bits, group, kind)`: "uneven" biases are no integer multiples of the scales, as in GGUF.

    `per_token`: activations are rounded with one scale for each token, else in groups.
    """
    models: dict[Any, LoadedModel] = {}

    def get(
        family: str = "llama", bits: int = 4, group: int = 32, kind: str = "native", per_token: bool = False
    ) -> Any:
        key = family, bits, group, kind, per_token
        if key not in models:
            source = tiny_model(family)
            model, config = load_model(source)
            model, config = quantize_model(model, config, group, bits)
            weights = dict(tree_flatten(model.parameters()))
            if kind == "uneven":
                weights |= {
                    name: value + 0.37 * weights[name.removesuffix("biases") + "scales"]
                    for name, value in weights.items()
                    if name.endswith(".biases")
                }
            path = tmp_path_factory.mktemp(f"{family}{bits}")
            mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
            (path / "config.json").write_text(json.dumps(config))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(check, "rounds_per_token", lambda cached: per_token)
                models[key] = load(path)
        return models[key]

    return get


def some_tokens(number: int, length: int) -> list[int]:
    return [(7 * i + 31 * number) % 250 for i in range(length)]


def feed_tokens(kv_cache: Any, sequence: Any, tokens: Sequence[int], prompt: bool = False) -> np.ndarray:
    """Feeds `tokens` and returns a copy of their logits, [N, V]."""
    return np.array(kv_cache.forward([Feed(sequence, list(tokens), len(tokens), prompt)]))


def on_mlx(model: LoadedModel) -> LoadedModel:
    return replace(model, cpu=None)


@pytest.mark.parametrize("family", SUPPORTED)
def test_ragged_chains_have_the_logits_of_mlx(loaded: Loaded, family: str) -> None:
    model, found = loaded(family), []
    assert model.cpu is not None and not model.cpu.quantised
    for kv_cache in (open_kv_cache(model), FlatKVCache(model.model)):
        sequences = [kv_cache.open() for _ in range(3)]
        lengths = (30, 7, 60)  # past gemma's window of 32
        for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            kv_cache.forward([Feed(sequence, some_tokens(number, length), 0, True)])
        feeds = [
            Feed(sequence, some_tokens(9, count), count) for sequence, count in zip(sequences, (5, 1, 3), strict=True)
        ]
        found.append(np.array(kv_cache.forward(feeds)))
    assert np.abs(found[0] - found[1]).max() < 2e-4
    assert not np.array_equal(*found)  # so these are two computations


def test_text_at_the_end_of_the_buffers_shares_a_forward_with_any_chain(loaded: Loaded) -> None:
    """Attention computes as many queries for each text as for the longest chain, and needs columns for all of them."""
    kv_cache = open_kv_cache(loaded("llama"))
    text, other = kv_cache.open(), kv_cache.open()
    feed_tokens(kv_cache, other, some_tokens(2, 20), prompt=True)
    for length in range(0, 260, 10):
        alone = feed_tokens(kv_cache, text, some_tokens(1, 10))
        text.roll_back(length)
        together = kv_cache.forward([Feed(text, some_tokens(1, 10), 10), Feed(other, some_tokens(3, 33), 33)])
        assert np.abs(np.array(together)[:10] - alone).max() < 1e-4, length
        other.roll_back(20)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SUPPORTED])
def test_unsupported_families_are_left_to_mlx(loaded: Loaded, family: str) -> None:
    model = loaded(family)
    assert model.cpu is None


def test_heads_of_a_width_that_has_no_kernel_are_left_to_mlx(
    loaded: Loaded, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """This is found before a graph is built, which would fail and let ONNX Runtime print an error."""
    assert loaded("llama", head_dim=24).cpu is None
    assert "heads of width 24 are not supported, only multiples of 16" in caplog.text
    assert "GroupQueryAttention" not in capfd.readouterr().err


@pytest.mark.parametrize("per_token", [False, PER_TOKEN])
@pytest.mark.parametrize("family", SUPPORTED)
def test_logits_of_a_quantised_model_stay_close_to_those_of_mlx(
    quantised: Quantised, family: str, per_token: bool
) -> None:
    """They differ only because activations, and weights of other forms, are rounded to 8 bits."""
    model = quantised(family, per_token=per_token)
    assert model.cpu is not None and model.cpu.quantised
    assert model.number_format.startswith("int8-onnxruntime-")
    kv_cache, tokens = open_kv_cache(model), some_tokens(1, 40)
    found = feed_tokens(kv_cache, kv_cache.open(), tokens)
    own = np.array(model.model(mx.array([tokens]))[0])
    assert np.sqrt(np.square(found - own).mean()) < 0.1 * own.std()


@pytest.mark.parametrize("per_token", [False, PER_TOKEN])
@pytest.mark.parametrize(("bits", "group", "kind"), SETTINGS)
def test_biases_of_every_form_of_affine_weights_are_applied(
    quantised: Quantised, bits: int, group: int, kind: str, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised("llama", bits, group, kind, per_token)
    _, rest = Affine.of(model.model.layers[0].mlp.down_proj).zero_points()
    assert rest.any() == (kind == "uneven")
    kv_cache, tokens = open_kv_cache(model), some_tokens(1, 12)
    own = np.array(model.model(mx.array([tokens]))[0])
    assert np.sqrt(np.square(feed_tokens(kv_cache, kv_cache.open(), tokens) - own).mean()) < 0.1 * own.std()
    if kind == "uneven" and not per_token:  # with rounded zero points alone, the error is large
        own_points = Affine.zero_points
        monkeypatch.setattr(Affine, "zero_points", lambda self: (own_points(self)[0], np.zeros_like(self.biases)))
        wrong = OrtForward(DecoderLayers.of(model.model, "llama"))
        found = check.feed_in_pieces(wrong, np.array(tokens, np.int32), (len(tokens),))
        assert np.sqrt(np.square(found - own).mean()) > 0.2 * own.std()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(40, 5), (40, 32), (40, 48)])
def test_rest_of_the_biases_is_coded_within_half_a_step_of_its_group(bits: int, shape: tuple[int, int]) -> None:
    rest = np.random.default_rng(5).uniform(-0.5, 0.5, shape).astype(np.float32)
    levels, scales = graph._quantise(rest, bits, 32)
    steps = np.repeat(scales, 32, axis=1)
    coded = (levels - float(2 ** (bits - 1))) * steps
    assert steps.max() <= 0.5 / (2 ** (bits - 1) - 0.5)
    assert (np.abs(coded[:, : shape[1]] - rest) <= 0.501 * steps[:, : shape[1]]).all()
    assert not coded[:, shape[1] :].any()


@pytest.mark.parametrize(
    ("family", "bits", "group", "kind", "per_token"),
    [
        ("llama", 4, 32, "native", False),
        ("llama", 8, 64, "native", False),
        ("qwen3", 4, 64, "native", False),
        ("smollm3", 4, 64, "native", False),
        ("granite", 4, 64, "uneven", False),
        ("gemma3_text", 4, 32, "uneven", False),
        pytest.param("llama", 4, 32, "uneven", True, marks=sums_fit),
        pytest.param("gemma3_text", 8, 64, "native", True, marks=sums_fit),
    ],
)
def test_logits_are_bit_equal_at_every_forward_width(
    quantised: Quantised, family: str, bits: int, group: int, kind: str, per_token: bool
) -> None:
    """With 1 to 32 tokens per forward, fed as chains and as prompt chunks."""
    kv_cache = open_kv_cache(quantised(family, bits, group, kind, per_token))
    tokens, whole = some_tokens(3, 40), kv_cache.open()
    truth = feed_tokens(kv_cache, whole, tokens, True)
    for width in range(1, 33):
        sequence = kv_cache.open()
        parts = [
            feed_tokens(kv_cache, sequence, tokens[i : i + width], width > 16) for i in range(0, len(tokens), width)
        ]
        assert np.array_equal(np.concatenate(parts), truth), width
        kv_cache.close(sequence)


@pytest.mark.parametrize("min_rows", [2, 16])
def test_padded_forwards_have_the_same_bits(
    quantised: Quantised, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU whose kernels compute a single row differently, every forward gets at least two."""
    model = quantised()
    tokens, kv_cache = some_tokens(3, 12), open_kv_cache(model)
    truth = feed_tokens(kv_cache, kv_cache.open(), tokens)
    monkeypatch.setattr(model.cpu, "min_rows", min_rows)
    sequence, parts = kv_cache.open(), []
    for start, end in pairwise((0, 1, 2, 5, 12)):
        parts.append(feed_tokens(kv_cache, sequence, tokens[start:end]))
    assert np.array_equal(np.concatenate(parts), truth)


@sums_fit
def test_outliers_do_not_take_the_levels_of_other_activations(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one scale per token, a few large activations would round all others to zero; rotations spread them."""
    model, config = load_model(tiny_model("llama"))
    for layer in model.layers:
        own = layer.self_attn
        factors = mx.where(mx.arange(own.q_proj.weight.shape[1]) == 3, 15.0, 1.0)
        layer.input_layernorm.weight *= factors
        for projection in (own.q_proj, own.k_proj, own.v_proj):
            projection.weight /= factors
    model, config = quantize_model(model, config, 32, 8)
    tokens, decoder = np.array(some_tokens(1, 30), np.int32), DecoderLayers.of(model, "llama")
    own = np.array(model(mx.array(tokens[None]))[0])

    def error() -> float:
        found = check.feed_in_pieces(OrtForward(decoder, per_token=True), tokens, (len(tokens),))
        return float(np.sqrt(np.square(found - own).mean()) / own.std())

    rotated = error()
    monkeypatch.setattr(graph, "_MAX_BLOCK_SIZE", 1)
    plain = error()
    assert rotated < 0.12 and plain > 1.4 * rotated, (rotated, plain)


@sums_fit
def test_token_without_any_activation_has_the_logits_of_mlx(tiny_model: Callable[..., Path]) -> None:
    """Its largest activation is 0, and so is its scale."""
    model, config = load_model(tiny_model("llama"))
    model.model.embed_tokens.weight[5] = 0
    model, config = quantize_model(model, config, 32, 8)
    tokens = np.array([5, 9, 5], np.int32)
    per_token = OrtForward(DecoderLayers.of(model, "llama"), per_token=True)
    found = check.feed_in_pieces(per_token, tokens, (1, 2))
    own = np.array(model(mx.array(tokens[None]))[0])
    assert np.isfinite(found).all() and np.abs(found - own).max() < 0.3 * max(own.std(), 1)


def test_matrices_with_one_input_may_be_quantised_differently(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """As in Q4_K_M files, whose v_proj has six bits, kept in half precision."""
    model, config = load_model(tiny_model("llama"))
    model, config = quantize_model(
        model, config, 32, 4, quant_predicate=lambda path, of: hasattr(of, "to_quantized") and "v_proj" not in path
    )
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mixed = load(tmp_path)
    assert mixed.cpu is not None
    kv_cache, tokens = open_kv_cache(mixed), some_tokens(3, 40)
    truth = feed_tokens(kv_cache, kv_cache.open(), tokens, True)
    for width in (1, 2, 7):
        sequence = kv_cache.open()
        parts = [feed_tokens(kv_cache, sequence, tokens[i : i + width], False) for i in range(0, len(tokens), width)]
        assert np.array_equal(np.concatenate(parts), truth), width


def test_text_can_pass_the_end_of_the_tabulated_angles(loaded: Loaded) -> None:
    """A token that is fed alone is padded to two rows, so it needs the angles of one position more."""
    made = OrtForward(DecoderLayers.of(loaded("llama").model, "llama"))
    end = len(made._angles[0][0])
    caches = [FlatCache(FlatAttentionMetadata()) for _ in made.shapes]
    for start, count in ((0, end - 1), (end - 1, 1), (end, 1)):
        part = Segment(0, start, count)
        logits = made(np.array(some_tokens(3, count)), [part], caches, np.arange(1))["logits"]
        assert np.isfinite(logits).all()


@pytest.mark.parametrize("per_token", [False, PER_TOKEN])
def test_logits_are_bit_equal_with_concurrent_requests(quantised: Quantised, per_token: bool) -> None:
    """The text has neighbours of other lengths on both sides: some read their prompt, are idle, or leave."""
    kv_cache = open_kv_cache(quantised(per_token=per_token))
    tokens = some_tokens(3, 60)
    truth = feed_tokens(kv_cache, kv_cache.open(), tokens)
    others = [kv_cache.open() for _ in range(2)]
    own = kv_cache.open()
    others += [kv_cache.open() for _ in range(2)]
    found, counts = [], iter((7, 1, 2, 1, 13, 5, 1, 8, 1, 3, 18))
    while own.length < 60:
        number, count = own.length, next(counts)
        feeds = [
            Feed(o, some_tokens(i, 4 + number % 5), 1 + number % 3) for i, o in enumerate(others) if number % 4 != i
        ]
        before = min(number % 3, len(feeds))
        feeds.insert(before, Feed(own, tokens[number : number + count], count))
        feeds.append(Feed(kv_cache.open(), some_tokens(8, 40), 0, True))
        logits, begin = np.array(kv_cache.forward(feeds)), sum(feed.num_logits for feed in feeds[:before])
        found.append(logits[begin : begin + count])
        kv_cache.close(feeds[-1].sequence)
        if number > 20 and others:
            kv_cache.close(others.pop(0))
    assert np.array_equal(np.concatenate(found), truth)


@pytest.mark.parametrize("per_token", [False, PER_TOKEN])
def test_logits_are_bit_equal_after_rollbacks_and_copies(quantised: Quantised, per_token: bool) -> None:
    kv_cache = open_kv_cache(quantised(per_token=per_token))
    tokens = some_tokens(3, 50)
    truth = feed_tokens(kv_cache, kv_cache.open(), tokens)
    sequence = kv_cache.open()
    feed_tokens(kv_cache, sequence, tokens[:20])
    for length in (19, 11, 3):
        feed_tokens(kv_cache, sequence, some_tokens(5, 9))
        sequence.roll_back(length)
        feed_tokens(kv_cache, sequence, tokens[length:20])
    assert np.array_equal(feed_tokens(kv_cache, sequence, tokens[20:30]), truth[20:30])
    saved = kv_cache.save(sequence, 25)
    feed_tokens(kv_cache, sequence, some_tokens(6, 30))
    other = kv_cache.open()
    kv_cache.adopt(other, saved.cut(23))
    assert np.array_equal(feed_tokens(kv_cache, other, tokens[23:]), truth[23:])


def test_forward_does_not_write_to_an_idle_text(quantised: Quantised) -> None:
    """The idle text's row lies between the rows of two texts that are fed, in the same buffers."""
    kv_cache = open_kv_cache(quantised())
    sequences = [kv_cache.open() for _ in range(3)]
    for number, sequence in enumerate(sequences):
        feed_tokens(kv_cache, sequence, some_tokens(number, 20))
    before = [np.array(part) for part in kv_cache.save(sequences[1], 20).layers[0]]
    kv_cache.forward([Feed(sequence, some_tokens(4, 6), 6) for sequence in (sequences[0], sequences[2])])
    after = [np.array(part) for part in kv_cache.save(sequences[1], 20).layers[0]]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def test_keys_and_values_of_a_quantised_model_are_float16(quantised: Quantised, loaded: Loaded) -> None:
    """So are the prefixes that the prompt cache saves. Those of a float32 model are not rounded."""
    for model, dtype in ((quantised(), mx.float16), (loaded("llama"), mx.float32)):
        kv_cache = open_kv_cache(model)
        sequence = kv_cache.open()
        feed_tokens(kv_cache, sequence, some_tokens(1, 20))
        assert {part.dtype for part in kv_cache.save(sequence, 20).layers[0]} == {dtype}


@pytest.mark.parametrize("points", [(1,), (BEFORE_NORM,), (0, 2, AFTER_NORM)])
def test_hidden_rows_equal_those_of_mlx(loaded: Loaded, points: tuple[Point, ...]) -> None:
    model, found = loaded("llama"), []
    for kv_cache in (open_kv_cache(model), FlatKVCache(model.model)):
        kv_cache.tap_hidden_states(HiddenStates(model.model, HiddenStateReader(points)))
        received: list[mx.array] = []
        sequences = [kv_cache.open() for _ in range(2)]
        kv_cache.forward(
            [Feed(sequences[0], some_tokens(1, 9), 0, True, received.append), Feed(sequences[1], some_tokens(2, 3), 3)]
        )
        kv_cache.forward([Feed(sequence, some_tokens(3, 2), 2, False, received.append) for sequence in sequences])
        found.append(np.concatenate([np.array(rows) for rows in received]))
    assert found[0].shape == (13, len(points) * 64)
    assert np.abs(found[0] - found[1]).max() < 1e-4


def test_returned_rows_are_not_overwritten_by_the_next_forward(loaded: Loaded) -> None:
    """The next forward uses the same buffers, but returns other rows."""
    model = loaded("llama")
    forward = OrtForward(DecoderLayers.of(model.model, model.model_type))
    caches = [FlatCache(FlatAttentionMetadata()) for _ in forward.shapes]
    part, wanted = Segment(0, 0, 4), np.arange(4)
    rows = forward(np.array([1, 2, 3, 4]), [part], caches, wanted, (1,))["layer1"]
    before = rows.copy()
    forward(np.array([9, 8, 7, 6]), [part], caches, wanted)
    assert np.array_equal(rows, before)


def test_layer_buffers_of_different_sizes_are_bound_as_they_are(loaded: Loaded) -> None:
    """Layers' buffers grow one at a time, and a larger buffer may have the address of a smaller one."""
    model = loaded("llama")
    forward = OrtForward(DecoderLayers.of(model.model, model.model_type))
    memory = [np.zeros(2 * 64 * shape.kv_heads * shape.width, np.float32) for shape in forward.shapes for _ in range(2)]

    @dataclass
    class CacheAtFixedAddress:
        """A layer's cache at a fixed address. The first layer's has 64 columns, the others' have `columns`."""

        number: int
        columns: int

        @property
        def views(self) -> int:
            return self.columns

        def on_host(self, rows: int, columns: int, like: mx.array) -> tuple[np.ndarray, np.ndarray]:
            shape = (1, like.shape[1], self.columns if self.number else 64, like.shape[3])
            keys, values = (memory[2 * self.number + i][: int(np.prod(shape))].reshape(shape) for i in range(2))
            return keys, values

    tokens, part, wanted = np.array([1, 2, 3, 4]), Segment(0, 0, 4), np.arange(4)
    for columns in (64, 128):
        caches = [CacheAtFixedAddress(number, columns) for number in range(len(forward.shapes))]
        forward(tokens, [part], caches, wanted)
    shape = forward.shapes[1]
    grown = memory[2][: 128 * shape.kv_heads * shape.width].reshape(shape.kv_heads, 128, shape.width)
    assert np.abs(grown[:, :4]).min() > 0


@pytest.mark.parametrize("family", SUPPORTED)
def test_tree_scores_and_choices_equal_those_of_mlx(loaded: Loaded, family: str) -> None:
    """Through forks, a commit, more forks and a gather; also past the first buffer of columns."""
    model, params = loaded(family), SamplingParams(temp=0.8, seed=3)
    prompt = [(7 * i) % 250 for i in range(300)]
    assert find_tree_form(model) is JointKVRows
    both = [
        open_tree(model, prompt, params, kv_rows=kv_rows)
        for kv_rows in (JointKVRows(model), DenseKVRows(on_mlx(model)))
    ]
    for _ in range(3):
        bests = []
        for grown in both:
            tips = grown.feed([grown.root] * 9, list(range(20, 29)))
            deeper = grown.feed(tips, [None] * 9)
            bests.append(grown.best([*tips, *deeper]))
            grown.commit([tips[4], deeper[4]])
        one, other = (np.array(grown.scores(grown.root)) for grown in both)
        assert float(np.abs((one - other) - (one - other).mean()).max()) < 2e-4
        assert bests[0] == bests[1]
        assert column_tokens(both[0]) == column_tokens(both[1])


def test_rows_of_a_closed_tree_are_reused_without_a_trace(quantised: Quantised) -> None:
    """The keys and values that a row held before do not affect the next text."""
    model = quantised()
    assert find_tree_form(model) is JointKVRows

    def tree(tokens: Sequence[int]) -> Tree:
        return open_tree(model, tokens, SamplingParams(), kv_rows=JointKVRows(model))

    first, second = tree(some_tokens(1, 40)), tree(some_tokens(2, 9))
    alone = np.array(second.scores(second.feed([second.root], [5])[0]))
    second.close()
    del second
    again = tree(some_tokens(2, 9))
    nodes = Tree.feed_together([first, again], [TreeFeed([t.root], [5]) for t in (first, again)])
    assert np.array_equal(np.array(again.scores(nodes[1][0])), alone)


def test_quantised_target_verifies_no_trees(quantised: Quantised, loaded: Loaded) -> None:
    """A side branch's attention sums its keys in another order than a chain's, so its bits would differ."""
    assert not open_kv_cache(quantised()).trees
    assert open_kv_cache(loaded("llama")).trees


def test_ort_texts_begin_no_step_ahead(loaded: Loaded) -> None:
    assert not open_kv_cache(loaded("llama")).open().has_free_marks


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_saved_prefix_survives_rewriting_of_its_row(loaded: Loaded, kv_heads: int) -> None:
    """Forwards write in place, so a saved prefix must not share memory with its row.

    A row with one head is contiguous, so that a careless copy would share it.
    """
    kv_cache = open_kv_cache(loaded("llama", num_key_value_heads=kv_heads))
    sequence = kv_cache.open()
    feed_tokens(kv_cache, sequence, some_tokens(1, 30))
    saved = kv_cache.save(sequence, 30)
    before = [np.array(keys) for keys, _ in saved.layers]
    sequence.roll_back(3)
    feed_tokens(kv_cache, sequence, some_tokens(2, 20))
    assert all(np.array_equal(old, keys) for old, (keys, _) in zip(before, saved.layers, strict=True))


def test_cpu_kernels_variable_selects_mlx(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "mlx")
    assert load(tiny_model("llama")).cpu is None
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, "auto")
    assert load(tiny_model("llama")).cpu is not None


@pytest.mark.parametrize("fault", ["rope", "order", "weight"])
def test_graph_that_computes_another_model_is_not_used(
    tiny_model: Callable[..., Path], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX computes the model if the graph omits rotations, swaps keys and values, or has other weights."""

    def without_rotation(rope: object, width: int, count: int) -> np.ndarray:
        return np.stack([np.ones((count, width // 2), np.float32), np.zeros((count, width // 2), np.float32)])

    linear = graph.Builder.linear

    def with_values_as_keys(builder: graph.Builder, x: str, layers: Sequence[nn.Module]) -> str:
        q, *others = layers
        return linear(builder, x, [q, *reversed(others)] if len(others) == 2 else layers)

    if fault == "rope":
        monkeypatch.setattr("outrider.engine.ort.forward.rope_angles", without_rotation)
    elif fault == "order":
        monkeypatch.setattr("outrider.engine.ort.graph.Builder.linear", with_values_as_keys)
    else:
        monkeypatch.setattr(
            "outrider.engine.ort.graph.to_numpy", lambda array: np.abs(np.array(array.astype(mx.float32)))
        )
    assert load(tiny_model("llama")).cpu is None
    monkeypatch.undo()
    assert load(tiny_model("llama")).cpu is not None


@pytest.mark.parametrize(
    "error", [MemoryError(), ModelError("ONNX Runtime refuses this model's graph: std::bad_alloc")]
)
def test_mlx_does_not_compute_a_model_that_memory_ran_out_for(
    tiny_model: Callable[..., Path], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX needs more memory: dense float32 weights, and buffers that OpenBLAS would request forever."""

    def run_out(*_: object) -> None:
        raise error

    monkeypatch.setattr(check, "OrtForward", run_out)
    with pytest.raises(ModelError, match="does not fit in memory"):
        load(tiny_model("llama"))


def test_window_of_a_layer_whose_cache_keeps_all_tokens_is_left_to_mlx(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as SmolLM3's sliding layers: the graph would let them see all tokens, which the short check can't detect."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert loaded("smollm3", layer_types=kinds, sliding_window=8).cpu is None
    assert "it has layers with a window, but their caches keep all tokens" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("nanbeige", {"num_loops": 2}),  # its layers are computed twice
        ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    ],
)
def test_what_the_graph_can_not_compute_is_left_to_mlx(loaded: Loaded, family: str, settings: dict[str, Any]) -> None:
    assert loaded(family, **settings).cpu is None


def test_layer_that_the_graph_does_not_know_is_refused(loaded: Loaded) -> None:
    model = loaded("llama").model
    decoder = DecoderLayers.of(model, "llama")
    layout = Layout.of(decoder)
    layer = model.layers[0].mlp
    kept, layer.down_proj = layer.down_proj, nn.Sequential(layer.down_proj)
    try:
        with pytest.raises(ModelError, match="Sequential"):
            build(decoder, layout)
    finally:
        layer.down_proj = kept
