"""Tiny random models and their packages, converted once a session."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from outrider.drafters.coreml import runtimes, trial
from outrider.drafters.coreml.converter import convert
from outrider.drafters.coreml.drafter import CoreMLDrafter, CoreMLKVRows, PackageHost
from outrider.drafters.coreml.package import MODEL_PATH, WEIGHTS_PATH, Package, open_package
from outrider.drafters.coreml.trial import Trial
from outrider.drafters.coreml.weights import EMBEDDING, Checkpoint
from tests import tiny
from tests.harness import mil_interpreter, mil_program
from tests.harness.mil_interpreter import NumpyRuntime
from tests.harness.mil_program import SavedModel

MS = {"q1": 2.25, "q8": 2.5, "q16": 3.0, "q32": 4.0, "prefill64": 6.0}
GOOD = Trial("", 2.0, 1.0, 0.001, MS, 0.97)
VOCAB = 512
CONTEXT = 256

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True)
class Converted:
    """A model on disk, the package converted from it, and ways to run both."""

    model_path: Path
    package: Package

    def host(self) -> PackageHost:
        return PackageHost(self.package, NumpyRuntime(self.package.path))

    def drafter(self) -> CoreMLDrafter:
        return CoreMLDrafter(self.package, NumpyRuntime(self.package.path))

    def mlx(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        """The model, with the package's numbers if they are quantised."""
        model, _ = load_model(self.model_path)
        if self.package.layout.weights == "int8":
            own = Checkpoint(self.model_path, "int8").read(lambda done, total: None)
            embedding = (f"{EMBEDDING}.weight", mx.array(own.embedding))
            model.load_weights([embedding, *own.dense("")], strict=False)
        model.set_dtype(dtype)
        return model

    def mlx_logits(self, tokens: list[int], dtype: mx.Dtype = mx.float32) -> NDArray[np.float32]:
        """MLX's logits [len(tokens), vocab], from one forward."""
        return np.array(self.mlx(dtype)(mx.array([tokens]))[0].astype(mx.float32))

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """The package's logits [len(tokens), vocab]; its functions with logits take turns."""
        host = self.host()
        kv_rows, rows, turn = CoreMLKVRows(host), [], 0
        scored = [function for function in host.layout.functions if function.logits]
        while kv_rows.length < len(tokens):
            function = scored[turn % len(scored)]
            fresh = kv_rows.read(tokens[kv_rows.length : kv_rows.length + function.rows], function)
            rows.append(fresh.logits)
            turn += 1
        return np.concatenate(rows)


@pytest.fixture(scope="session", autouse=True)
def _interpreted() -> Iterator[None]:
    """Replaces Core ML by the interpreter, here and in processes that tests start. It reads coremltools' packages."""
    if find_spec("coremltools") is None:
        pytest.skip("coremltools is not installed: it has no wheels for this Python or this system")
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform != "darwin":
            patch.setenv(runtimes.STAND_IN_VARIABLE, mil_interpreter.__name__)
        yield


@pytest.fixture
def good_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each trial succeed at once, without a process of its own."""
    monkeypatch.setattr(trial, "run_trial", lambda package, units: GOOD)


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    """Parses each package's file once for all interpreters, unless it changes."""
    known: dict[tuple[Path, int, int], SavedModel] = {}
    read = mil_program.read

    def once(package: Path) -> SavedModel:
        file = package / MODEL_PATH
        key = (package, file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
        if key is None or not (package / WEIGHTS_PATH).is_file():
            return read(package)
        if key not in known:
            known[key] = read(package)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mil_program, "read", once)
        yield


@pytest.fixture(scope="session")
def converted(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Converted]:
    """`converted(family, weights="fp16", context=256, **config) -> Converted`."""
    root = tmp_path_factory.mktemp("packages")
    made: dict[str, Converted] = {}

    def make(family: str = "llama", weights: str = "fp16", context: int = CONTEXT, **config: Any) -> Converted:
        sizes = {**SIZES, **config}
        settings = {**tiny.BASE, **tiny.FAMILIES[family], **sizes}  # so that passing a default makes no second package
        key = json.dumps([family, weights, context, settings], sort_keys=True)
        if key not in made:
            model = tiny_model(family, **sizes)
            directory = root / str(len(made))
            convert(model, directory, weights, context)
            made[key] = Converted(model, open_package(directory, source=model))
        return made[key]

    return make


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """`figure(name, value)`: records a number that a test measured; `figures.py` in this folder prints it."""
    return lambda name, value: record_property(f"figure:{name}", float(value))


@pytest.fixture(scope="session")
def text() -> list[int]:
    """200 random tokens."""
    return np.random.default_rng(7).integers(0, VOCAB, 200).tolist()
