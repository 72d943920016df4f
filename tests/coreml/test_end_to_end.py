"""A cluster whose draft runs on the reference interpreter generates the target's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as cache_of
from typing import Any

import pytest

from outrider import Client, LocalCluster, SamplingParams
from outrider.drafters.coreml import trial
from outrider.drafters.coreml.selection import PREFERRED_UNITS, cached_package
from tests.coreml.conftest import GOOD, SIZES
from tests.tiny import VOCAB_SIZE, Pair

NAMES = ("name", "size", "path", "mode")
LONG = "\n".join(f"    def get_{name}(self):\n        return self._{name}\n" for name in NAMES)
PROMPT = f"class Entry:\n{LONG}\n    def get_owner(self):\n"
SAMPLINGS = {temp: SamplingParams(max_tokens=24, temp=temp, seed=5, ignore_eos=True) for temp in (0.0, 0.8)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Any]) -> Iterator[None]:
    """Converts the draft and stores a successful trial of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(trial, "run_trial", lambda package, units: GOOD)
        trial.try_once(cached_package(models["draft_model"], print), PREFERRED_UNITS[0], print)
        yield


@pytest.fixture(scope="module")
def models(random_pair: Callable[..., Pair]) -> dict[str, Any]:
    pair = random_pair("llama", **{**SIZES, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE})  # each token has a text
    return {"model": pair.target, "draft_model": pair.draft, "ngrams": False}


@pytest.fixture(scope="module")
def coreml(cache: None, models: dict[str, Any]) -> Iterator[Client]:
    with LocalCluster(draft_backend="coreml", **models) as cluster:
        yield cluster.client()


@pytest.fixture(scope="module")
def package_reads_prompts(cache: None, models: dict[str, Any]) -> Iterator[Client]:
    """A cluster in which MLX drafts and the package reads the draft's prompts."""
    with LocalCluster(draft_backend="mlx", draft_prefill="coreml", **models) as cluster:
        yield cluster.client()


Text = tuple[int, ...]


@pytest.fixture(scope="module")
def alone(coreml: Client) -> Callable[[float], Text]:
    """`alone(temp)`: the target's own text."""
    return cache_of(lambda temp: generated(coreml, "ar", temp))


def generated(client: Client, mode: str, temp: float) -> Text:
    return client.generate(PROMPT, SAMPLINGS[temp], mode=mode).token_ids


@pytest.mark.parametrize("temp", list(SAMPLINGS))
def test_text_equals_that_of_the_target(coreml: Client, alone: Callable[[float], Text], temp: float) -> None:
    for mode in ("sd", "ssd"):
        assert generated(coreml, mode, temp) == alone(temp)


def test_prompts_read_by_the_package_do_not_change_the_text(
    alone: Callable[[float], Text], package_reads_prompts: Client
) -> None:
    """The text is that of AR, and it is the package that reads. Acceptance: test_acceptance.py."""
    (draft,) = [worker for worker in package_reads_prompts.stats().workers if worker.role == "draft"]
    assert draft.backend == "mlx" and draft.note.startswith("prompts are read by")
    assert generated(package_reads_prompts, "ssd", 0.8) == alone(0.8)


def test_stats_describe_the_core_ml_drafter(coreml: Client) -> None:
    (draft,) = [worker for worker in coreml.stats().workers if worker.role == "draft"]
    assert draft.backend == "coreml" and draft.context_length == 1024
    assert "reference interpreter" in draft.note or "Core ML" in draft.note
