"""Fixtures of the heads' tests: their target, and the sizes of ONNX Runtime's forwards."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import Embedding
from tests.target_worker.heads import markov_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return markov_llama(tmp_path_factory.mktemp("markov"))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pairs in each forward by ONNX Runtime."""
    counts, plain = list[int](), Embedding.__call__

    def call(self: Embedding, tokens: Any) -> Any:
        counts.append(len(tokens))
        return plain(self, tokens)

    monkeypatch.setattr(Embedding, "__call__", call)
    return counts
