"""A simulated run that could not keep its profile gives no figures."""

from __future__ import annotations

import pytest

from outrider.bench.comparison.runs import require_pace
from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.profile import NOT_KEPT


def result(*notes: str) -> GenerationResult:
    return GenerationResult("", (), "length", Timings(), 0, "ssd", 1, "m", "d", notes)


def test_run_that_missed_the_times_of_its_profile_fails() -> None:
    require_pace(result("auto: ssd, the best"))
    with pytest.raises(WorkerError, match=f"the simulation failed: target-0: {NOT_KEPT}: 30"):
        require_pace(result("auto: ssd, the best", f"target-0: {NOT_KEPT}: 30 ms late"))
