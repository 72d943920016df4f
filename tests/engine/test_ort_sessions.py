"""Graphs kept on disk, and forwards on the drafters' core, too: the same bits, whatever happens to the files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_model, quantize_model, save_model

from outrider.engine.kv_cache import Feed
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import load
from outrider.engine.ort import forward, sessions
from outrider.protocol.digest import CACHE
from outrider.protocol.worker_link import DRAFTER_CORE

TOKENS = [(7 * i) % 250 for i in range(40)]


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantised model, whose graph is kept although it is small."""
    made, config = load_model(tiny_model("llama"))
    made, config = quantize_model(made, config, 32, 4)
    folder = tmp_path / "model"
    save_model(folder, made)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sessions, "_SMALLEST", 0)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return folder


def logits(model: Path, all_cores: bool = False) -> np.ndarray:
    kv_cache = open_kv_cache(load(model))
    sequence = kv_cache.open()
    parts = [TOKENS[:20], TOKENS[20:21], TOKENS[21:]]
    feeds = [Feed(sequence, part, len(part), all_cores=all_cores) for part in parts]
    return np.concatenate([np.array(kv_cache.forward([feed])) for feed in feeds])


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "graphs").glob("*/*"))


def fail_if_called(*_: Any, **__: Any) -> None:
    raise AssertionError("the kept graph was not used")


def test_cached_graph_is_used_without_another_build_or_check(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(model)
    assert [path.name for path in kept(tmp_path)[0].iterdir()]
    monkeypatch.setattr(forward, "build", fail_if_called)
    monkeypatch.setattr(forward, "check", fail_if_called)
    assert np.array_equal(logits(model), first)


def test_changed_model_file_or_kernel_replaces_the_cached_graph(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(model)
    (old,) = kept(tmp_path)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    logits(model)
    (new,) = kept(tmp_path)
    assert new != old
    monkeypatch.setattr(sessions, "kernels", lambda: "int8-onnxruntime-9.0-sve")
    logits(model)
    assert kept(tmp_path) != [new]


@pytest.mark.parametrize("name", ["graph.onnx", "weights.bin", "checked.json"])
def test_damaged_cache_file_is_rebuilt(model: Path, tmp_path: Path, name: str) -> None:
    first = logits(model)
    file = kept(tmp_path)[0] / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert np.array_equal(logits(model), first)
    assert np.array_equal(logits(model), first)
    assert file.exists()


def test_unwritable_cache_does_not_change_the_logits(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first = logits(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "below"))
    assert np.array_equal(logits(model), first)


def test_graph_of_a_large_model_is_not_cached(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LARGEST", 1)
    logits(model)
    assert kept(tmp_path) == []


def test_logits_are_bit_equal_for_any_number_of_cores(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = logits(model)
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    monkeypatch.setenv(DRAFTER_CORE, str(core))
    opened = load(model).cpu
    assert opened is not None and opened._sessions.all_cores is not None
    assert np.array_equal(logits(model, all_cores=True), alone)
    assert np.array_equal(logits(model), alone)
