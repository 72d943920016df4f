"""What each thing costs by itself, sampled between the runs of a contest, so that a drifting machine drifts for
both.

At any time one process works and all others are still. A chain is asked for right after a verify, as SD asks for it: a
drafter that has just waited is slower than one that drafts chain upon chain.

`costs`: times that were measured one by one, as the formula wants them (`orchestrator.core.policy.forecasts`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.bench.timing.loops import Curve, aheads, medians, milliseconds, numbers_of, steps, turns, verifies, whole
from outrider.bench.timing.workbench import Workbench
from outrider.orchestrator.core.policy.forecasts import Costs
from outrider.protocol.sampling import SamplingParams

Milliseconds = Callable[[int], float]


def costs(
    step_ms: float,
    verify_ms: Milliseconds,
    chain_ms: Milliseconds,
    ahead_ms: Milliseconds = lambda depth: 0.0,
    *,
    between_ms: float = 0.0,
    turnaround_ms: float | None = None,
) -> Costs:
    """What a round is made of.

    Args:
        step_ms: a token of plain decoding.
        verify_ms: a verify by its rows.
        chain_ms: a chain that is asked for, by its length.
        ahead_ms: the work ahead by its depth; nothing where no tree is waited for.
        between_ms: the target's wait in SD beyond the chain's time.
        turnaround_ms: its wait on a hit; None: the same. A chain that is asked for keeps SD's wait.
    """
    usual_ms = between_ms if turnaround_ms is None else turnaround_ms
    more_ms = max(between_ms - usual_ms, 0.0)
    return Costs(step_ms, verify_ms, lambda depth: chain_ms(depth) + more_ms, ahead_ms, usual_ms)


# Rounds of each kind in a sample.
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
        return costs(
            self.step_ms,
            self.verify_ms,
            self.chain_ms,
            self.ahead_ms,
            between_ms=self.between_ms,
            turnaround_ms=turnaround_ms,
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
        rows = [*range(1, self._depths[-1] + 2), *(more for more in MORE_ROWS if more > self._depths[-1] + 1)]
        needed = max(numbers_of(ROUNDS)[-1] * (self._depths[-1] + 1), rows[-1]) + 2
        length = max(sampling.max_tokens, 2 * needed)
        text, spans = self._bench.text(prompt, length, endless)
        self._steps += steps(spans)
        known = (len(prompt) + length // 2, text)
        for count, verify_ms in verifies(self._bench, known, endless, rows * ROUNDS):
            self._verify[count].append(verify_ms)
        for depth in self._depths:
            for turn in turns(self._bench, known, endless, depth, numbers_of(ROUNDS)):
                self._chain[depth].append(turn.chain_ms)
                self._between.append(turn.between_ms)
            for spans in aheads(self._bench, known, endless, depth, self._branches, numbers_of(ROUNDS)):
                self._ahead[depth].append(milliseconds(whole(spans)))

    def read(self) -> Alone:
        """Medians of all samples so far; at least one."""
        return Alone(
            statistics.median(self._steps),
            medians(self._verify),
            medians(self._chain),
            medians(self._ahead),
            statistics.median(self._between),
        )
