"""What each thing costs by itself, sampled between the runs of a contest, so that a drifting machine drifts for both.

At any time one process works and all others are still. A chain is asked for right after a verify, as SD asks for it: a
drafter that has just waited is slower than one that drafts chain upon chain.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.bench.timing.curve import Curve, medians, milliseconds
from outrider.bench.timing.probe import cadence
from outrider.bench.timing.workbench import Workbench
from outrider.orchestrator.core.speedup import Costs
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

# Rounds of each kind in a sample; the one before them, cold caches included, is not counted.
ROUNDS = 2
# Rows of a verify that are timed beyond K+1, for n-grams may fill a chain further.
MORE_ROWS = (12, 16)


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians in milliseconds. `step_ms` is a run-ahead token of the target; `chain_ms(K)` from asking to having;
    `ahead_ms(K)` the work ahead, all branches K deep; `between_ms` the target's wait in SD beyond the chain's time."""

    step_ms: float
    verify_ms: Curve
    chain_ms: Curve
    ahead_ms: Curve
    between_ms: float

    def costs(self, turnaround_ms: float | None = None) -> Costs:
        """For the formula. `turnaround_ms` is a run's own, of its hits; a chain that is asked for has SD's, alone."""
        between_ms = self.between_ms if turnaround_ms is None else turnaround_ms
        more_ms = max(self.between_ms - between_ms, 0.0)
        return Costs(
            self.step_ms, self.verify_ms, lambda depth: self.chain_ms(depth) + more_ms, self.ahead_ms, between_ms
        )


class Stopwatch:
    """Collects samples; `read` whenever enough are there. K up to the greatest of `depths`, B = `branches`."""

    def __init__(self, bench: Workbench, depths: Sequence[int], branches: int) -> None:
        self._bench = bench
        self._depths = sorted({1, *depths})
        self._branches = branches
        self._steps: list[float] = []
        self._between: list[float] = []
        self._verify: defaultdict[int, list[float]] = defaultdict(list)
        self._chain: defaultdict[int, list[float]] = defaultdict(list)
        self._ahead: defaultdict[int, list[float]] = defaultdict(list)

    def sample(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Times everything once more, over the text that the target itself says after `prompt`: plain steps all along
        it, the rest from its middle, so that as much is attended to as in a run on average. A few seconds.

        Raises:
            WorkerError: there is no drafter, or a worker was lost.
        """
        self._bench.need_drafter()
        endless = replace(sampling, max_tokens=1 << 20)
        needed = max((ROUNDS + 1) * (self._depths[-1] + 1), MORE_ROWS[-1]) + 2
        length = max(sampling.max_tokens, 2 * needed)
        text, spans = self._bench.text(prompt, length, endless)
        self._steps += cadence(spans)
        middle = len(prompt) + length // 2
        for _ in range(ROUNDS):
            self._time_verify(middle, text, endless)
        for depth in self._depths:
            self._time_chain(middle, text, endless, depth)
            self._time_ahead(middle, text, endless, depth)

    def read(self) -> Alone:
        """Medians of all samples so far; at least one."""
        return Alone(
            statistics.median(self._steps),
            medians(self._verify),
            medians(self._chain),
            medians(self._ahead),
            statistics.median(self._between),
        )

    def _time_verify(self, start: int, text: Sequence[int], sampling: SamplingParams) -> None:
        """c(M), each row count from the same place."""
        usual = range(1, self._depths[-1] + 2)
        for rows in (*usual, *(rows for rows in MORE_ROWS if rows not in usual)):
            self._bench.open(text[:start], sampling, target=True, drafter=False)
            warm = self._bench.verify(1, start + 1, ())
            base_len = start + 2 + warm.accepted
            outcome = self._bench.verify(2, base_len, text[base_len : base_len + rows - 1])
            self._verify[rows].append(milliseconds(outcome.work))
            self._bench.close()

    def _time_chain(self, start: int, text: Sequence[int], sampling: SamplingParams, depth: int) -> None:
        """Rounds as SD makes them: the chain is drafted, then as long a chain is verified."""
        self._bench.open(text[:start], sampling, target=True, drafter=True)
        told, at = start, start + 1
        for number in range(1, ROUNDS + 2):
            _, whole_ms = self._bench.chain(number, at, text[told:at], depth)
            outcome = self._bench.verify(number, at, text[at : at + depth])
            if number > 1:
                self._chain[depth].append(whole_ms)
                self._between.append(max(outcome.idle_ns / 1e6 - whole_ms, 0.0))
            told, at = at, at + outcome.accepted + 1
        self._bench.close()

    def _time_ahead(self, start: int, text: Sequence[int], sampling: SamplingParams, depth: int) -> None:
        self._bench.open(text[:start], sampling, target=False, drafter=True)
        told, at = start, start + 1
        for number in range(1, ROUNDS + 2):
            chain = text[at : at + depth]
            _, spans = self._bench.work_ahead(number, at, text[told:at], chain, depth, self._branches)
            if number > 1:
                self._ahead[depth].append(milliseconds(Span(spans[0].started_ns, spans[-1].ended_ns)))
            told, at = at, at + depth + 1
        self._bench.close()
