"""A pair in three processes, with the draft on the reference interpreter: the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import Client, LocalCluster, SamplingParams
from outrider.orchestrator.client.dialogue import GenerationResult
from tests.coreml.conftest import SIZES
from tests.tiny import VOCAB_SIZE, Pair

NAMES = ("name", "size", "path", "mode")
LONG = "\n".join(f"    def get_{name}(self):\n        return self._{name}\n" for name in NAMES)
PROMPTS = ("def fibonacci(n):\n", f"class Entry:\n{LONG}\n    def get_owner(self):\n")
SAMPLINGS = {temp: SamplingParams(max_tokens=24, temp=temp, seed=5, ignore_eos=True) for temp in (0.0, 0.8)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No package is there at first; who comes second finds what the first one made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def models(tiny_pair: Callable[..., Pair]) -> dict[str, Any]:
    pair = tiny_pair("llama", **{**SIZES, "vocab_size": VOCAB_SIZE})  # no token without a text
    return {"model": pair.target, "draft_model": pair.draft, "ngrams": False}


@pytest.fixture(scope="module")
def coreml(cache: None, models: dict[str, Any]) -> Iterator[Client]:
    with LocalCluster(draft_backend="coreml", **models) as cluster:
        yield cluster.client()


@pytest.fixture(scope="module")
def handed(cache: None, models: dict[str, Any]) -> Iterator[Client]:
    """MLX drafts, the package reads its prompts."""
    with LocalCluster(draft_backend="mlx", draft_prefill="coreml", **models) as cluster:
        yield cluster.client()


Runs = dict[tuple[str, str, float], list[GenerationResult]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """What was generated already."""
    return {}


def run(runs: Runs, client: Client, mode: str, temp: float) -> list[GenerationResult]:
    (draft,) = [worker for worker in client.stats().workers if worker.role == "draft"]
    key = (draft.backend + draft.note, mode, temp)
    if key not in runs:
        runs[key] = [client.generate(prompt, SAMPLINGS[temp], mode=mode) for prompt in PROMPTS]
    return runs[key]


@pytest.mark.parametrize("temp", list(SAMPLINGS))
def test_text_equals_that_of_the_target(runs: Runs, coreml: Client, temp: float) -> None:
    alone = [result.token_ids for result in run(runs, coreml, "ar", temp)]
    for mode in ("sd", "ssd"):
        assert [result.token_ids for result in run(runs, coreml, mode, temp)] == alone


@pytest.mark.parametrize("temp", list(SAMPLINGS))
def test_prompts_read_by_the_package_do_not_change_the_text(
    runs: Runs, coreml: Client, handed: Client, temp: float
) -> None:
    """Same text as AR; and it is the package that reads. Acceptance: test_acceptance.py."""
    (draft,) = [worker for worker in handed.stats().workers if worker.role == "draft"]
    assert draft.backend == "mlx" and draft.note.startswith("prompts of 1 tokens and more are read by")
    alone = [result.token_ids for result in run(runs, coreml, "ar", temp)]
    for mode in ("sd", "ssd"):
        assert [result.token_ids for result in run(runs, handed, mode, temp)] == alone


def test_stats_describe_the_core_ml_drafter(coreml: Client) -> None:
    (draft,) = [worker for worker in coreml.stats().workers if worker.role == "draft"]
    assert draft.backend == "coreml" and draft.context_length == 1024
    assert "reference interpreter" in draft.note or "Core ML" in draft.note
