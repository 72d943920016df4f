"""What decides whether working ahead pays: the verify alone, the work ahead alone, and both at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.timing.workbench import Workbench
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

WARM_UP_ROUNDS = 3
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


@dataclass(frozen=True, slots=True)
class _Round:
    """Where a round stands in the text: `new` tokens become committed, `chain` is verified behind them."""

    number: int
    base_len: int
    new: tuple[int, ...]
    chain: tuple[int, ...]


def measure(bench: Workbench, prompt: Sequence[int], rounds: int, depth: int, branches: int) -> Overlap:
    """`rounds` rounds of each kind over the target's own text, so that every verify accepts its whole chain.

    Raises:
        WorkerError: there is no drafter, a worker was lost, or one did not answer.
    """
    bench.need_drafter()
    text, _ = bench.text(prompt, (rounds + WARM_UP_ROUNDS) * (depth + 1) + 1, GREEDY)
    plan = list(_rounds(text, len(prompt), rounds + WARM_UP_ROUNDS, depth))

    bench.open(prompt, GREEDY, target=True, drafter=False)
    verify = [bench.verify(r.number, r.base_len, r.chain).work for r in plan]
    bench.close()
    bench.open(prompt, GREEDY, target=False, drafter=True)
    ahead = [_whole(bench.work_ahead(r.number, r.base_len, r.new, r.chain, depth, branches)[1]) for r in plan]
    bench.close()
    bench.open(prompt, GREEDY, target=True, drafter=True)
    beside = [bench.both(r.number, r.base_len, r.new, r.chain, depth, branches) for r in plan]
    bench.close()
    return Overlap(
        rounds,
        depth,
        branches,
        _median(verify),
        _median(ahead),
        _median([_whole([done.outcome.work, done.ahead]) for done in beside]),
        _median([done.outcome.work for done in beside]),
        _median([done.ahead for done in beside]),
    )


def _rounds(text: Sequence[int], start: int, count: int, depth: int) -> Iterator[_Round]:
    """K+1 tokens a round; each round's chain is the text itself."""
    at, told = start + 1, start
    for number in range(1, count + 1):
        yield _Round(number, at, tuple(text[told:at]), tuple(text[at : at + depth]))
        told, at = at, at + depth + 1


def _whole(spans: Sequence[Span]) -> Span:
    return Span(min(span.started_ns for span in spans), max(span.ended_ns for span in spans))


def _median(spans: Sequence[Span]) -> float:
    return statistics.median((span.ended_ns - span.started_ns) / 1e6 for span in spans[WARM_UP_ROUNDS:])
