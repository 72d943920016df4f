"""Cached graphs give the same bits whatever happens to their files, also on both the target's and drafters' core."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model, quantize_model, save_model

from outrider.engine.kv_cache import Feed
from outrider.engine.load_checks import open_kv_cache, probe_abilities
from outrider.engine.loading import load
from outrider.engine.ort import check, exact_biases, forward, graph, sessions
from outrider.orchestrator.machine.system import USABLE_CORES
from outrider.protocol import digest
from outrider.protocol.digest import CACHE_VARIABLE
from outrider.protocol.errors import ModelError
from outrider.protocol.worker_link import ANY_CORE, DRAFTER_CORE_VARIABLE
from tests.engine.test_ort import PER_TOKEN, sums_fit

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")

CORE = max(USABLE_CORES, default=1)
TOKENS = [(7 * i) % 250 for i in range(40)]


def quantised(source: Path, folder: Path, bits: int = 4, uneven: bool = True) -> Path:
    """Saves a quantised model; `uneven` biases are no integer multiples of the scales, as in GGUF."""
    made, config = load_model(source)
    made, config = quantize_model(made, config, 32, bits)
    if uneven:
        for module in made.modules():
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                module.biases += 0.37 * module.scales
    save_model(folder, made)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantised model whose graph is cached although it is small."""
    monkeypatch.setattr(sessions, "_MIN_WEIGHT_BYTES", 0)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return quantised(tiny_model("llama"), tmp_path / "model")


@pytest.fixture(params=[False, PER_TOKEN])
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether activations are rounded per token, or else in groups."""
    monkeypatch.setattr(check, "rounds_per_token", lambda cached: request.param)
    return bool(request.param)


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "rounds_per_token", lambda cached: False)


def logits(model: Path, all_cores: bool = False) -> np.ndarray:
    kv_cache = open_kv_cache(load(model))
    sequence = kv_cache.open()
    parts = [TOKENS[:20], TOKENS[20:21], TOKENS[21:]]
    feeds = [Feed(sequence, part, len(part), all_cores=all_cores) for part in parts]
    return np.concatenate([np.array(kv_cache.forward([feed])) for feed in feeds])


def test_onnx_runtime_collects_no_telemetry(tmp_path: Path) -> None:
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), str(tmp_path))
    line = [sys.executable, "-m", "outrider.engine.models_only", "outrider.engine.ort.sessions"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **places}
    subprocess.run(line, env=environment, check=True, timeout=200)
    assert list(tmp_path.rglob("*")) == []  # neither an identifier of this machine nor events to upload


def cached_graphs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "graphs").glob("[!.]*"))


def fail_if_called(*_: Any, **__: Any) -> None:
    raise AssertionError("the cached graph was not used")


@pytest.mark.usefixtures("rounding")
def test_cached_graph_is_used_without_another_build_or_check(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(model)
    assert [path.name for path in cached_graphs(tmp_path)[0].iterdir()]
    monkeypatch.setattr(graph, "build", fail_if_called)
    monkeypatch.setattr(forward, "_to_embedding_rows", fail_if_called)
    monkeypatch.setattr(check, "check_logits", fail_if_called)
    monkeypatch.setattr(check, "_first_token", fail_if_called)  # reads a file
    assert np.array_equal(logits(model), first)


@sums_fit
def test_graph_in_groups_is_kept_where_rounding_per_token_is_too_imprecise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_groups: None
) -> None:
    expected = logits(model)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(check, "rounds_per_token", lambda cached: True)
    sound = graph.Builder._per_token
    monkeypatch.setattr(graph.Builder, "_per_token", lambda b, x, whole: b.op("Sin", sound(b, x, whole)))
    assert np.array_equal(logits(model), expected)
    monkeypatch.setattr(graph, "build", fail_if_called)
    assert np.array_equal(logits(model), expected)


@pytest.mark.parametrize(
    ("named", "generation", "first"),
    [
        ({"bos_token_id": 77}, {"bos_token_id": 5}, 77),
        ({"bos_token_id": None, "text_config": {"bos_token_id": 77}}, {}, 77),
        ({"bos_token_id": None, "text_config": {}}, {"bos_token_id": 77}, 77),
        ({"bos_token_id": None}, {"bos_token_id": None}, 13),
    ],
)
def test_text_of_the_check_begins_as_the_models_texts_do(
    model: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], generation: dict[str, Any], first: int
) -> None:
    """Without its usual first token, a model may give all attention to few tokens; rounding then seems an error."""
    texts: list[list[int]] = []
    sound = check.feed_in_pieces

    def record(of: Any, tokens: Any, *rest: Any, **settings: Any) -> Any:
        texts.append([int(token) for token in tokens])
        return sound(of, tokens, *rest, **settings)

    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    (model / "generation_config.json").write_text(json.dumps(generation))
    monkeypatch.setattr(check, "feed_in_pieces", record)
    cpu, text = load(model).cpu, texts[-1]
    assert cpu is not None
    assert {text[0] for text in texts} == {first}
    assert len(set(text)) == len(text)
    for following, scores in zip(text[1:], sound(cpu, np.array(text, np.int32), (len(text),)), strict=False):
        scores[text[: text.index(following)]] = -np.inf
        assert scores.argmax() == following


@pytest.mark.parametrize(("bits", "factor"), [(4, 1.0), (8, 3.0), (6, 1.0), (None, 2.0)])
def test_rows_of_an_embedding_are_the_modules_from_memory_and_from_a_file(
    tmp_path: Path, bits: int | None, factor: float
) -> None:
    layer: nn.Module = nn.Embedding(300, 96)
    if bits is not None:
        layer = nn.QuantizedEmbedding.from_embedding(layer, 32, bits)
    tokens = np.array([299, 0, 7, 7])
    expected = np.array(layer(mx.array(tokens))) * factor
    for folder in (None, tmp_path, tmp_path):
        assert np.allclose(forward.Embedding(layer, factor, folder)(tokens), expected, atol=1e-6)
    kept_rows = forward.Embedding(layer, factor, tmp_path)
    os.truncate(tmp_path / "embedding.bin", 40)
    with pytest.raises(ModelError, match="was truncated"):
        kept_rows(tokens)


def test_later_loads_of_a_model_do_without_onnx(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from outrider.engine.models_only import models_only; models_only()\n"
        "from outrider.engine.ort import sessions; sessions._MIN_WEIGHT_BYTES = 0\n"
        "from outrider.engine.loading import load; assert load(Path(sys.argv[1])).cpu is not None\n"
        "print('onnx' in sys.modules)"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=100, check=True
        )
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in found] == ["True", "False"]


def test_changed_model_file_or_kernel_replaces_the_cached_graph(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(model)
    (old,) = cached_graphs(tmp_path)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    logits(model)
    (new,) = cached_graphs(tmp_path)
    assert new != old
    monkeypatch.setattr(sessions, "kernel_name", lambda: "int8-onnxruntime-9.0-sve")
    logits(model)
    assert cached_graphs(tmp_path) != [new]


def test_weights_that_change_in_place_replace_the_cached_graph(model: Path, tmp_path: Path) -> None:
    """The digest of a model reads the beginning of each tensor only."""
    before = logits(model)
    (old,) = cached_graphs(tmp_path)
    file = model / "model.safetensors"
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    end = 8 + int.from_bytes(raw[:8], "little") + header["model.embed_tokens.weight"]["data_offsets"][1]
    raw[end - 5000 : end] = bytes(5000)
    file.write_bytes(raw)
    assert not np.array_equal(logits(model), before) and cached_graphs(tmp_path) != [old]


def test_graphs_that_were_not_used_for_long_are_removed(model: Path, tmp_path: Path) -> None:
    """Their models may have been deleted. A graph that is in use stays, however old it is."""
    forgotten, used = (shutil.copytree(model, tmp_path / name) for name in ("forgotten", "used"))
    logits(forgotten)
    (oldest,) = cached_graphs(tmp_path)
    logits(used)
    for graph_folder in cached_graphs(tmp_path):
        os.utime(graph_folder, (0, 0))
    digest._in_use.clear()  # as if the processes that made them had ended
    logits(used)
    before = cached_graphs(tmp_path)
    logits(model)
    assert len(before) == 2 and set(before) - set(cached_graphs(tmp_path)) == {oldest}


def test_processes_with_and_without_a_drafters_core_share_the_cached_graph(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is repeated, since one core's does not count for two; the graph is the same."""
    logits(model)
    (graph_folder,) = cached_graphs(tmp_path)
    monkeypatch.setenv(DRAFTER_CORE_VARIABLE, str(CORE))
    logits(model)
    assert cached_graphs(tmp_path) == [graph_folder]
    monkeypatch.delenv(DRAFTER_CORE_VARIABLE)
    monkeypatch.setattr(sessions.CachedGraph, "record_check", fail_if_called)
    logits(model)
    assert cached_graphs(tmp_path) == [graph_folder]


def test_processes_with_more_threads_share_the_cached_graph(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing a large model's weights takes a minute. Only the check is repeated, which takes a second."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = logits(model)
    checks = []
    monkeypatch.setattr(graph, "build", fail_if_called)
    monkeypatch.setattr(sessions.CachedGraph, "record_check", lambda _, min_rows: checks.append(min_rows))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert np.array_equal(logits(model), alone)
    assert len(cached_graphs(tmp_path)) == len(checks) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    logits(model)
    assert len(checks) == 1


def test_damaged_cache_files_are_rebuilt(model: Path, tmp_path: Path, rounding: bool) -> None:
    first = logits(model)
    (folder,) = cached_graphs(tmp_path)
    checked = f"checked-{sessions.num_threads()}"
    names = {"graph.onnx", "weights.bin", checked, "biases.bin", "biases.json", "embedding.bin"}
    names -= {"biases.bin", "biases.json"} if rounding or not exact_biases.IS_SUPPORTED else set()
    for name in sorted(names):
        whole = (folder / name).stat().st_size
        for damage in (lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink):
            damage(folder / name)
            assert np.array_equal(logits(model), first), name
            assert (folder / name).stat().st_size == whole, name
    assert np.array_equal(logits(model), first)


def unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))


def test_cache_that_cannot_be_looked_up_is_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/" + "x" * 300)
    assert load(model).cpu is not None


def test_unwritable_cache_does_not_change_the_logits(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases that are multiples of the scales. Others are then rounded, and the number format says so."""
    even = quantised(tiny_model("llama"), tmp_path / "even", uneven=False)
    first = logits(even)
    unwritable_cache(tmp_path, monkeypatch)
    assert np.array_equal(logits(even), first)


@pytest.mark.parametrize("scarce", ["memory", "disk"])
def test_graph_is_read_but_not_written_when_memory_or_disk_is_short(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    with monkeypatch.context() as patch:
        simulate_shortage(scarce, patch)
        logits(model)
        assert cached_graphs(tmp_path) == []
    logits(model)
    simulate_shortage(scarce, monkeypatch)
    monkeypatch.setattr(graph, "build", fail_if_called)
    logits(model)


def simulate_shortage(scarce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scarce == "memory":
        monkeypatch.setattr(sessions, "physical_memory", lambda: 1000)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))


def test_graph_depends_only_on_the_files_that_are_loaded(model: Path) -> None:
    """Not on weights in another layout, nor on the files that macOS adds on other file systems."""
    alone = sessions.CachedGraph.of(model)
    with (model / "consolidated.safetensors").open("wb") as file:
        file.truncate(2**40)
    (model / "._model.safetensors").write_bytes(b"metadata")
    assert alone is not None and sessions.CachedGraph.of(model) == alone


@pytest.mark.skipif(not exact_biases.IS_SUPPORTED, reason="only Linux has exact biases")
@pytest.mark.usefixtures("in_groups")
@pytest.mark.parametrize("cores", [False, True])
def test_cached_graph_has_exact_biases(model: Path, tmp_path: Path, monkeypatch: Any, cores: bool) -> None:
    """Its logits are nearer to MLX's than those with rounded biases, in each session, at the first load and later."""
    if cores:
        monkeypatch.setenv(DRAFTER_CORE_VARIABLE, str(CORE))
    own = np.array(load(model).model(mx.array([TOKENS]))[0])
    found = [logits(model, all_cores=cores) for _ in range(2)]
    exact = load(model).number_format
    unwritable_cache(tmp_path, monkeypatch)
    rounded, plain = logits(model, all_cores=cores), load(model).number_format
    errors = [np.sqrt(np.square(each - own).mean()) for each in (found[0], rounded)]
    assert errors[0] < errors[1] < 0.1 * own.std()
    assert np.array_equal(*found) and not np.array_equal(found[0], rounded)
    assert exact == f"{plain}-exact"


@pytest.mark.usefixtures("in_groups")
def test_biases_are_rounded_where_packed_weights_have_no_place_for_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CPUs with another layout of packed weights, or with a version of ONNX Runtime that does not map them."""
    if not load(model).number_format.endswith("-exact"):
        pytest.skip("biases are rounded on this machine anyway")
    exact = logits(model)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(exact_biases, "_interleave", np.ravel)
    rounded = logits(model)
    assert not np.array_equal(rounded, exact) and cached_graphs(tmp_path)
    assert not load(model).number_format.endswith("-exact")
    monkeypatch.undo()
    monkeypatch.setattr(check, "rounds_per_token", lambda cached: False)
    monkeypatch.setattr(sessions, "_MIN_WEIGHT_BYTES", 0)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    monkeypatch.setattr(exact_biases, "_mappings", lambda weights: [])
    assert np.array_equal(logits(model), rounded)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("core", [str(CORE), ANY_CORE])
def test_logits_are_bit_equal_for_any_number_of_cores(model: Path, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    alone = logits(model)
    monkeypatch.setenv(DRAFTER_CORE_VARIABLE, core)
    opened = load(model)
    assert opened.cpu is not None and opened.cpu.has_all_cores and probe_abilities(opened).all_cores
    assert np.array_equal(logits(model, all_cores=True), alone)
    assert np.array_equal(logits(model), alone)


def test_forwards_use_all_cores_only_while_that_is_faster() -> None:
    choice = sessions.CoreChoice()

    def share_of_all(own_ms: float, all_ms: float, rows: int = 1) -> float:
        """Returns the share of 1,000 forwards that use all cores, after 1,000 to learn these times."""
        chosen = []
        for _ in range(2000):
            chosen.append(choice.use_all(rows))
            choice.record(rows, chosen[-1], all_ms if chosen[-1] else own_ms)
        return sum(chosen[1000:]) / 1000

    assert choice.use_all(1)
    assert share_of_all(8, 6) > 0.95
    assert share_of_all(9, 20) < 0.05
    assert share_of_all(10, 8, rows=4) > 0.95, "other numbers of rows have their own times"
    assert share_of_all(8, 6) > 0.95


def test_target_without_a_core_of_the_drafters_reports_none(model: Path) -> None:
    assert not probe_abilities(load(model)).all_cores
