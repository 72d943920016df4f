"""What decides whether working ahead pays: the verify alone, the work ahead alone, and both at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.timing.curve import milliseconds
from outrider.bench.timing.loops import WARM_UP, aheads, numbers_of, places_of, verifies, whole
from outrider.bench.timing.workbench import Workbench
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over rounds, milliseconds. `verify`: the target alone; `ahead`: the drafter alone; `both`: side by side,
    from the first start to the last end; `verify_beside` and `ahead_beside`: each while the other worked."""

    rounds: int
    depth: int
    branches: int
    verify: float
    ahead: float
    both: float
    verify_beside: float
    ahead_beside: float

    @property
    def efficiency(self) -> float:
        """1: the shorter of the two hides fully behind the longer; 0: they take turns."""
        return (self.verify + self.ahead - self.both) / min(self.verify, self.ahead)

    @property
    def speedup(self) -> float:
        return (self.verify + self.ahead) / self.both


def measure(bench: Workbench, prompt: Sequence[int], rounds: int, depth: int, branches: int) -> Overlap:
    """`rounds` rounds of each kind over the target's own text, so that every verify accepts its whole chain.

    Raises:
        WorkerError: there is no drafter, a worker was lost, or one did not answer.
    """
    bench.need_drafter()
    numbers = numbers_of(rounds)
    known = (len(prompt), bench.text(prompt, len(numbers) * (depth + 1) + 1, GREEDY)[0])
    verify = [verify_ms for _, verify_ms in verifies(bench, known, GREEDY, [depth + 1] * rounds)]
    ahead = [milliseconds(whole(spans)) for spans in aheads(bench, known, GREEDY, depth, branches, numbers)]
    bench.open(prompt, GREEDY, target=True, drafter=True)
    places = places_of(known, depth, numbers)
    done = [bench.both(at.number, at.base_len, at.new, at.chain, depth, branches) for at in places]
    bench.close()
    beside = done[WARM_UP:]
    return Overlap(
        rounds,
        depth,
        branches,
        statistics.median(verify),
        statistics.median(ahead),
        _median([whole([both.outcome.work, both.ahead]) for both in beside]),
        _median([both.outcome.work for both in beside]),
        _median([both.ahead for both in beside]),
    )


def _median(spans: Sequence[Span]) -> float:
    return statistics.median(map(milliseconds, spans))
