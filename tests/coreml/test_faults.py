"""A device fails in the middle of a request: drafting stops, and the request continues to the same text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider.drafters.coreml.drafter import CoreMLDrafter
from outrider.drafters.coreml.runtimes import Inputs, Outputs, RuntimeFault
from outrider.engine.loading import load
from outrider.protocol.sampling import SamplingParams
from tests.coreml.conftest import Converted
from tests.harness.mil_interpreter import NumpyRuntime
from tests.system.cluster import Cluster
from tests.system.links import VirtualClock

SAMPLING = SamplingParams(max_tokens=40, temp=0.8, seed=9)


class FailingRuntime:
    """The interpreter, which returns NaN or infinity, or raises, after its first `after` calls."""

    name = "the failing device"

    def __init__(self, made: Converted, after: int, how: str) -> None:
        self._inner = NumpyRuntime(made.package.path)
        self._after, self._how, self.calls = after, how, 0

    def call(self, function: str, inputs: Inputs) -> Outputs:
        self.calls += 1
        outputs = self._inner.call(function, inputs)
        if self.calls > self._after:
            if self._how == "dies":
                raise RuntimeFault("the failing device is gone; drafting is off for this request")
            outputs["logits_0"][:] = np.inf if self._how == "says infinity" else np.nan
        return outputs


@pytest.mark.parametrize(("how", "after"), [("dies", 0), ("dies", 9), ("says NaN", 1), ("says infinity", 9)])
def test_request_continues_without_a_failed_device(
    converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch, text: list[int], how: str, after: int
) -> None:
    made, clock = converted("llama"), VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    target = load(made.model_path)
    alone = Cluster(target, None, clock, ngrams=False).run(text[:12], SAMPLING, "ar")
    runtime = FailingRuntime(made, after, how)
    drafter = CoreMLDrafter(made.package, runtime)
    found = Cluster(target, drafter, clock, ngrams=False).run(text[:12], SAMPLING, "ssd")
    assert found.tokens == alone.tokens and len(found.tokens) == 40
    assert runtime.calls == after + 1  # it was not called again
    assert any("drafting is off for this request" in note for note in found.notes)
