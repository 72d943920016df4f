"""The tiny pair with a Core ML package as drafter, or as reader of prompts for MLX: acceptance is unchanged.

Runs in one process on a virtual clock, so that no drafter is ever late and every run drafts the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.drafters.coreml.converter import convert
from outrider.drafters.coreml.drafter import CoreMLDrafter, PackageReader
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.drafter import Drafter
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel, load
from outrider.orchestrator.pairing.model_files import tiny_pair
from outrider.protocol.sampling import SamplingParams
from tests.harness.mil_interpreter import NumpyRuntime
from tests.system.cluster import Cluster, Run
from tests.system.links import VirtualClock

NAMES = ("name", "size", "path", "mode")
TEXTS = (
    "def fibonacci(n):\n",
    "class Entry:\n" + "\n".join(f"    def get_{name}(self):\n        return self._{name}\n" for name in NAMES),
)
DRAFTERS = ("coreml", "read by the package")
TEMPS = (0.8,)  # test_end_to_end.py tests temperature 0 with a whole cluster
every_temp = pytest.mark.parametrize("temp", TEMPS)


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    target, draft = tiny_pair()
    return load(target), load(draft)


@pytest.fixture(scope="module")
def drafters(pair: tuple[LoadedModel, LoadedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafter]:
    directory = tmp_path_factory.mktemp("draft") / "package"
    convert(Path(tiny_pair()[1]), directory, "fp16", 256)
    package: Package = open_package(directory)
    reader = PackageReader(package, NumpyRuntime(package.path))
    return {
        "coreml": CoreMLDrafter(package, NumpyRuntime(package.path)),
        "mlx": MlxDrafter(pair[1]),
        "read by the package": MlxDrafter(pair[1], reader),
    }


@pytest.fixture(scope="module")
def runs_of(
    pair: tuple[LoadedModel, LoadedModel], drafters: dict[str, Drafter]
) -> Callable[[str, str, float], list[Run]]:
    """`runs_of(drafter, mode, temp)`: the runs of all texts, made once."""
    tokenizer = Tokenizer.from_file(str(Path(tiny_pair()[0]) / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    made: dict[tuple[str, str, float], list[Run]] = {}

    def run(drafter: str, mode: str, temp: float) -> list[Run]:
        if (drafter, mode, temp) not in made:
            sampling = SamplingParams(max_tokens=40, temp=temp, seed=5, ignore_eos=True)
            with pytest.MonkeyPatch.context() as patch:
                clock = VirtualClock()
                patch.setattr("outrider.protocol.clock.now", clock)
                cluster = Cluster(pair[0], drafters.get(drafter), clock, depth=4, ngrams=False)
                made[drafter, mode, temp] = [cluster.run(prompt, sampling, mode) for prompt in prompts]
        return made[drafter, mode, temp]

    return run


@pytest.mark.parametrize("drafter", DRAFTERS)
@every_temp
def test_text_equals_that_of_the_target(
    runs_of: Callable[[str, str, float], list[Run]], drafter: str, temp: float
) -> None:
    alone = [run.tokens for run in runs_of("none", "ar", temp)]
    assert all(len(tokens) == 40 for tokens in alone)
    assert [run.tokens for run in runs_of(drafter, "sd", temp)] == alone  # ssd: test_end_to_end.py


@pytest.mark.parametrize("drafter", DRAFTERS)
@every_temp
def test_acceptance_equals_that_of_mlx(
    runs_of: Callable[[str, str, float], list[Run]], drafter: str, temp: float, figure: Callable[[str, float], None]
) -> None:
    found, expected = (acceptance(runs_of(name, "sd", temp)) for name in (drafter, "mlx"))
    figure(f"acceptance at temperature {temp}, {drafter}", found)
    figure(f"acceptance at temperature {temp}, mlx", expected)
    assert abs(found - expected) <= 0.02


def acceptance(runs: list[Run]) -> float:
    drafted = sum(run.timings.draft_n for run in runs)
    assert drafted > 100
    return sum(run.timings.draft_n_accepted for run in runs) / drafted
