"""Pytest hooks, and the fixtures that all test folders share: tiny random models on disk, made once a session."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings

from outrider.protocol import clock
from tests.tiny import Pair, write_model

RUN_FIRST = ("system", "server", "coreml", "models", "orchestrator")
"""The folders with the slowest files. They run first, so that no slow file runs alone at the end."""
ONE_PROCESS = ("server", "coreml", "architecture")
"""Folders whose files share servers, packages or parsed sources: all files of one run in the same process."""

settings.register_profile("untimed", deadline=None)  # no test result depends on the machine's speed
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Turns off MLX's compilation on CPUs in the test processes, but not in the workers that they start.

    Compiling the kernels takes g++ half a minute on a new machine.
    """
    if mx.default_device() == mx.cpu:
        mx.disable_compile()
        mx.enable_compile = lambda: None  # called by `engine/sampling.py`


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes the 400,000 objects of the collected tests from garbage collection.

    They live until the end, and each load of a model runs a full collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Excludes the objects that a finished file leaves behind too, such as imported packages and session models."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RUN_FIRST.index(room) if (room := _room(item.nodeid)) in RUN_FIRST else len(RUN_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileOrFolderScheduling(LoadFileScheduling):
        """Assigns whole files to processes, and all files of the folders in `ONE_PROCESS` to one process."""

        def _split_scope(self, nodeid: str) -> str:
            return room if (room := _room(nodeid)) in ONE_PROCESS else str(super()._split_scope(nodeid))

    return FileOrFolderScheduling(config, log)


def _room(nodeid: str) -> str:
    """Returns the test folder of a test."""
    return nodeid.split("/")[1]


@pytest.fixture(scope="session", autouse=True)
def _isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the tests an empty cache and no keys, and makes the tiny pair the default model, so that no test downloads
    anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OUTRIDER_CACHE", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("OUTRIDER_MODEL", "tiny")
        yield


@pytest.fixture
def short() -> Iterator[Path]:
    """An empty directory with a path short enough for Unix sockets, unlike `tmp_path` on some systems."""
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock by one that advances a tenth of a millisecond at each reading, so that what workers measure
    does not depend on the machine's speed."""
    monkeypatch.setattr(clock, "now", count(0, clock.MILLISECOND_NS // 10).__next__)


@pytest.fixture(scope="module")
def mlx_on_cpu() -> Iterator[None]:
    """Makes MLX compute on the CPU even if there is a GPU, because ONNX Runtime is used on CPUs only."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family, seed=0, **config) -> Path`: the folder of a random model of this family (tests/tiny.py)."""
    root = tmp_path_factory.mktemp("tiny")

    def make(family: str = "llama", seed: int = 0, **config: Any) -> Path:
        key = hashlib.sha256(json.dumps([family, seed, config], sort_keys=True).encode()).hexdigest()[:12]
        path = root / f"{family}-{key}"
        return path if path.exists() else write_model(path, family, seed, **config)

    return make


@pytest.fixture(scope="session")
def random_pair(tiny_model: Callable[..., Path]) -> Callable[..., Pair]:
    """`random_pair(family, noise=0.04, **config) -> Pair`: a target, and a draft that agrees on about 60% of tokens.

    With `noise` 0 the models are equal, with 0.1 they agree on 45%, and with 1 they are unrelated.
    """

    def make(family: str = "llama", seed: int = 0, noise: float = 0.04, **config: Any) -> Pair:
        return Pair(tiny_model(family, seed, **config), tiny_model(family, seed, noise=noise, **config))

    return make
