"""Fixtures of the engine's tests: tiny models, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading import LoadedModel, load


@pytest.fixture(scope="session")
def loaded(tiny_model: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """`loaded(family, seed=0, **config)`: a `tiny_model` in memory, loaded once per session."""
    models: dict[Path, LoadedModel] = {}

    def get(family: str = "llama", seed: int = 0, **config: Any) -> LoadedModel:
        path = tiny_model(family, seed, **config)
        if path not in models:
            models[path] = load(path)
        return models[path]

    return get
