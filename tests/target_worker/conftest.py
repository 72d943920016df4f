"""The target of the tests of in-process heads."""

from __future__ import annotations

import pytest

from outrider.engine.loading import LoadedModel
from tests.target_worker.heads import markov_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return markov_llama(tmp_path_factory.mktemp("markov"))
