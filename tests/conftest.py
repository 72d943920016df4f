"""Fixtures every room shares: tiny random models on disk, made once a session."""

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

FIRST = ("system", "server", "coreml", "models", "orchestrator")
"""The rooms with files that take longest, which begin first: none of them is then left for one core at the end."""
TOGETHER = ("server", "coreml", "architecture")
"""Rooms whose files share servers, packages or parsed sources: one process runs all of each."""

settings.register_profile("untimed", deadline=None)  # no time decides a test
settings.load_profile("untimed")


def pytest_configure() -> None:
    """On a CPU, models in a test's own process do not compile their kernels, which takes half a minute of g++ on a new
    machine. Real workers do."""
    if mx.default_device() == mx.cpu:
        mx.disable_compile()
        mx.enable_compile = lambda: None  # which `engine/sampling.py` calls after its filters


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The 400,000 objects of collected tests live to the end, and each load of a model asks for a full garbage
    collection: it does not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Nor at what a file leaves behind: packages, and models of the session."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(room) if (room := _room(item.nodeid)) in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByShared(LoadFileScheduling):
        """A file at a time, or a room."""

        def _split_scope(self, nodeid: str) -> str:
            return room if (room := _room(nodeid)) in TOGETHER else str(super()._split_scope(nodeid))

    return ByShared(config, log)


def _room(nodeid: str) -> str:
    return nodeid.split("/")[1]


@pytest.fixture(scope="session", autouse=True)
def _no_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives tests a cache and keys of their own, and makes the tiny pair the default model, so that no test downloads
    anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OUTRIDER_CACHE", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("OUTRIDER_MODEL", "tiny")
        yield


@pytest.fixture
def short() -> Iterator[Path]:
    """An empty directory whose path leaves room for a socket's name (pytest's own does not on every system)."""
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers measure does not hang on how quick this machine is: they see a tenth of a millisecond go by at each
    look at the clock."""
    monkeypatch.setattr(clock, "now", count(0, clock.MILLISECOND_NS // 10).__next__)


@pytest.fixture(scope="module")
def mlx_on_cpu() -> Iterator[None]:
    """MLX computes on the CPU, also where there is a GPU; ONNX Runtime is used for CPUs only."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family, seed=0, **config) -> Path`: a random model of this family (see tests/tiny.py)."""
    root = tmp_path_factory.mktemp("tiny")

    def make(family: str = "llama", seed: int = 0, **config: Any) -> Path:
        key = hashlib.sha256(json.dumps([family, seed, config], sort_keys=True).encode()).hexdigest()[:12]
        path = root / f"{family}-{key}"
        return path if path.exists() else write_model(path, family, seed, **config)

    return make


@pytest.fixture(scope="session")
def random_pair(tiny_model: Callable[..., Path]) -> Callable[..., Pair]:
    """`random_pair(family, noise=0.04, **config) -> Pair`: a target, and a draft that agrees on about 0.6 of tokens.

    With `noise` 0 they are equal, at 0.1 they agree on 0.45, at 1 the draft is a stranger.
    """

    def make(family: str = "llama", seed: int = 0, noise: float = 0.04, **config: Any) -> Pair:
        return Pair(tiny_model(family, seed, **config), tiny_model(family, seed, noise=noise, **config))

    return make
