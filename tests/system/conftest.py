"""Fixtures of the system tests: tiny models in memory, clusters in one thread, plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.drafters.drafter import Drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel, load
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.protocol.sampling import SamplingParams
from tests.slots import open_slots, verify
from tests.system.cluster import Cluster
from tests.system.links import VirtualClock
from tests.system.small_models import DRAFT_NOISE, SMALL_CONFIG
from tests.target_worker.heads import markov_llama
from tests.tiny import Pair


@pytest.fixture(scope="session")
def loaded(tiny_model: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """`loaded(path)`: the model in memory, loaded once a session."""
    models: dict[Path, LoadedModel] = {}

    def get(path: Path) -> LoadedModel:
        if path not in models:
            models[path] = load(path)
        return models[path]

    return get


@pytest.fixture(scope="session")
def small_pair(
    random_pair: Callable[..., Pair], loaded: Callable[[Path], LoadedModel]
) -> Callable[..., tuple[LoadedModel, LoadedModel]]:
    """`small_pair("model", **config) -> target, draft`: the draft by its name in DRAFT_NOISE, with the same target for
    all."""

    def make(draft: str, **config: Any) -> tuple[LoadedModel, LoadedModel]:
        pair = random_pair("llama", noise=DRAFT_NOISE[draft], **{**SMALL_CONFIG, **config})
        return loaded(pair.target), loaded(pair.draft)

    return make


@pytest.fixture(scope="session")
def served(random_pair: Callable[..., Pair]) -> Pair:
    """A pair for real processes, if any text will do. It starts in half the time of the tiny pair."""
    return random_pair("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def served_target(served: Pair) -> LoadedModel:
    """The target of `served`, loaded in this process."""
    return load(served.target)


@pytest.fixture(scope="module")
def codec(served: Pair) -> TextCodec:
    """The tokenizer of `served`."""
    return load_codec(find_model(str(served.target)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A target whose text the heads of tests/target_worker/heads.py can predict."""
    return markov_llama(tmp_path_factory.mktemp("markov"))


@pytest.fixture
def make_cluster(
    small_pair: Callable[..., tuple[LoadedModel, LoadedModel]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Cluster]:
    """`make_cluster("model", depth=3, ...)`: a cluster with a draft model by name, a drafter, or no drafter (None).

    `config`: overrides of the models' configs. `target`: replaces the small pair's target. `colocated`: a draft model
    in the target's process, by name or loaded.
    """
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)

    def make(
        draft: str | Drafter | None,
        *,
        config: dict[str, Any] | None = None,
        target: LoadedModel | None = None,
        colocated: str | LoadedModel | None = None,
        **settings: Any,
    ) -> Cluster:
        known, drafting = small_pair(draft if isinstance(draft, str) else "self", **(config or {}))
        drafter = MlxDrafter(drafting) if isinstance(draft, str) else draft
        own = small_pair(colocated, **(config or {}))[1] if isinstance(colocated, str) else colocated
        return Cluster(target or known, drafter, clock, colocated=own, **settings)

    return make


@pytest.fixture(scope="session")
def plain() -> Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]:
    """`plain(model, prompt, sampling)`: the tokens that the target generates alone, one a forward."""
    known: dict[tuple[LoadedModel, tuple[int, ...], SamplingParams], list[int]] = {}

    def decode(model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        key = (model, tuple(prompt), sampling)
        if key not in known:
            slots = open_slots(model, [prompt], [sampling])
            known[key] = [verify(slots[0]).bonus for _ in range(sampling.max_tokens)]
        return known[key]

    return decode
