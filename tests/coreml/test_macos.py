"""Tests that need a Mac, run by launch/mac_check.sh; skipped elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafters.coreml import runtimes, trial
from outrider.drafters.coreml.drafter import CoreMLDrafter, CoreMLKVRows, PackageHost, PackageReader
from outrider.drafters.coreml.runtimes import CoreMLRuntime
from outrider.drafters.coreml.trial import agreement
from outrider.protocol.sampling import SamplingParams
from tests.coreml.conftest import Converted
from tests.harness.mil_interpreter import NumpyRuntime
from tests.slots import open_draft_tree

pytestmark = [
    pytest.mark.macos,
    pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: Core ML is there only"),
]


def logits(made: Converted, runtime: CoreMLRuntime, text: list[int]) -> NDArray[np.float32]:
    """The package's logits for all tokens from the 41st on; its functions take turns on one cache."""
    host, rows, turn = PackageHost(made.package, runtime), [], 0
    kv_rows = CoreMLKVRows(host)
    kv_rows.read(text[:40], host.layout.prefill)
    scored = [function for function in host.layout.functions if function.logits]
    while kv_rows.length < len(text):
        function = scored[turn % len(scored)]
        fresh = kv_rows.read(text[kv_rows.length : kv_rows.length + function.rows], function)
        rows.append(fresh.logits)
        turn += 1
    return np.concatenate(rows)


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_cpu_predictions_match_those_of_the_interpreter(
    converted: Callable[..., Converted], text: list[int], weights: str
) -> None:
    """Within float16 noise. All functions share one cache."""
    made = converted("qwen2", weights=weights)
    found = logits(made, CoreMLRuntime(made.package, "CPU_ONLY"), text)
    expected = logits(made, NumpyRuntime(made.package.path), text)
    assert np.abs(found - expected).max() <= 0.1 * expected.std()
    assert agreement(found, expected) >= 0.99


def test_a_float32_package_is_exact_on_the_cpu(converted: Callable[..., Converted], text: list[int]) -> None:
    made = converted("qwen2", weights="fp32")
    found = logits(made, CoreMLRuntime(made.package, "CPU_ONLY"), text)
    assert np.abs(found - logits(made, NumpyRuntime(made.package.path), text)).max() <= 1e-3


def test_the_neural_engine_passes_its_trial(converted: Callable[..., Converted]) -> None:
    row = trial.run_trial(converted("qwen2").package, "CPU_AND_NE")
    assert not row.reason, row.reason


def test_compute_plan_gives_the_share_of_the_neural_engine(converted: Callable[..., Converted]) -> None:
    share = runtimes.engine_share(converted("qwen2").package, "CPU_AND_NE")
    assert share is not None and 0 <= share <= 1


def test_a_thousand_predictions_are_consistent(converted: Callable[..., Converted]) -> None:
    made = converted("qwen2")
    host = PackageHost(made.package, CoreMLRuntime(made.package, "CPU_ONLY", ["q1"]))
    single, kv_rows, first = host.layout.functions[0], None, None
    for turn in range(1000):
        if turn % 200 == 0:
            kv_rows = CoreMLKVRows(host)
            result = kv_rows.read([7], single).logits
            first = result if first is None else first
            assert (result == first).all()
        else:
            assert kv_rows is not None and np.isfinite(kv_rows.read([turn % 500], single).logits).all()


def test_drafter_on_the_cpu_drafts_like_the_interpreter(converted: Callable[..., Converted], text: list[int]) -> None:
    made, drafted = converted("qwen2"), []
    for runtime in (CoreMLRuntime(made.package, "CPU_ONLY"), NumpyRuntime(made.package.path)):
        drafter = CoreMLDrafter(made.package, runtime)
        tree = open_draft_tree(drafter, text[:60], SamplingParams())
        drafted.append([tree.best(tree.feed([tree.root] * 8, list(range(8))))])
    same = np.mean([a == b for a, b in zip(drafted[0][0], drafted[1][0], strict=True)])
    assert same >= 0.75  # near-ties may fall either way


def test_prompts_read_on_the_cpu_match_those_of_the_interpreter(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    package = converted("qwen2").package
    runtimes = (CoreMLRuntime(package, "CPU_ONLY", ["prefill64"]), NumpyRuntime(package.path))
    found, expected = (list(PackageReader(package, runtime)(text[:150])) for runtime in runtimes)
    for one, other in zip(found, expected, strict=True):
        for layer, reference in zip(one, other, strict=True):
            for a, b in zip(map(np.array, layer), map(np.array, reference), strict=True):
                assert np.abs(a - b).max() <= 0.1 * b.std()


def test_has_engine_returns_a_bool_on_this_mac() -> None:
    assert isinstance(runtimes.has_neural_engine(), bool)
