"""A runner of one of our modes that also keeps the turnarounds: the target's wait before the verify of each hit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from outrider.bench.comparison.runs import Run, Timed, hit_turnarounds
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams


class TurnaroundRunner:
    """Runs as `mode_runner` does. `turnarounds_ms` are those of all its runs."""

    def __init__(self, client: Client, mode: str, depth: int | None = None, branches: int | None = None) -> None:
        self.turnarounds_ms: list[float] = []
        self._client, self._mode, self._depth, self._branches = client, mode, depth, branches

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        stream = self._client.stream(
            prompt, sampling, mode=self._mode, num_draft_tokens=self._depth, branches=self._branches, rounds=True
        )
        self.turnarounds_ms += hit_turnarounds([record for chunk in stream for record in chunk.rounds or ()])
        tokens, timings = stream.result.token_ids, stream.result.timings
        return Run(tokens, Timed(len(tokens) - 1, timings.predicted_ms / 1000), timings)


def median_turnaround(turnarounds_ms: Sequence[float]) -> float | None:
    """Returns the median; None without hits."""
    return statistics.median(turnarounds_ms) if turnarounds_ms else None
