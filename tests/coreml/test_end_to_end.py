"""The embedded pair through three processes, the draft on the reference interpreter: same text, same acceptance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator import Client, LocalCluster, SamplingParams
from orchestrator.client.result import GenerationResult

PROMPTS = ("def fibonacci(n):\n", "for item in items:\n")
SAMPLINGS = {temp: SamplingParams(max_tokens=40, temp=temp, seed=5, ignore_eos=True) for temp in (0.0, 0.8)}


@pytest.fixture(scope="module")
def coreml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with LocalCluster(draft_backend="coreml", ngrams=False) as cluster:
            yield cluster.client()


@pytest.fixture(scope="module")
def mlx() -> Iterator[Client]:
    with LocalCluster(draft_backend="mlx", ngrams=False) as cluster:
        yield cluster.client()


Runs = dict[tuple[str, str, float], list[GenerationResult]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """What was generated already."""
    return {}


def run(runs: Runs, client: Client, mode: str, temp: float) -> list[GenerationResult]:
    key = (client.stats().workers[-1].backend, mode, temp)
    if key not in runs:
        runs[key] = [client.generate(prompt, SAMPLINGS[temp], mode=mode) for prompt in PROMPTS]
    return runs[key]


@pytest.mark.parametrize("temp", list(SAMPLINGS))
def test_the_text_is_the_targets_own(runs: Runs, coreml: Client, temp: float) -> None:
    alone = [result.token_ids for result in run(runs, coreml, "ar", temp)]
    for mode in ("sd", "ssd"):
        assert [result.token_ids for result in run(runs, coreml, mode, temp)] == alone


@pytest.mark.parametrize("temp", list(SAMPLINGS))
def test_as_much_is_accepted_as_from_mlx(runs: Runs, coreml: Client, mlx: Client, temp: float) -> None:
    def acceptance(client: Client) -> float:
        timings = [result.timings for result in run(runs, client, "sd", temp)]
        drafted = sum(t.draft_n for t in timings)
        assert drafted > 40
        return sum(t.draft_n_accepted for t in timings) / drafted

    assert abs(acceptance(coreml) - acceptance(mlx)) <= 0.02


def test_it_says_what_it_is(coreml: Client) -> None:
    (draft,) = [worker for worker in coreml.stats().workers if worker.role == "draft"]
    assert draft.backend == "coreml" and draft.context_length == 1024
    assert "reference interpreter" in draft.note or "Core ML" in draft.note
