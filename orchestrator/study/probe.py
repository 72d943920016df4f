"""A probe of about a minute: what each thing costs and how often it succeeds, each measured alone.

Drives the real workers over the target's own text. Nothing here is a prediction; see `orchestrator.study.forecast`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.study.workbench import Workbench
from protocol.messages import Branch, Span
from protocol.sampling import SamplingParams

VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
REPEATS = 12
TEXT_TOKENS = 160
# Rounds that a drafter's first work, cold caches included, may spoil.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds by a whole number (rows, tokens, branches): measured points, straight lines between and beyond."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, at: int) -> float:
        known = dict(self.points)
        if at in known:
            return known[at]
        below = [point for point in self.points if point[0] < at][-2:]
        above = [point for point in self.points if point[0] > at][:2]
        (x0, y0), (x1, y1) = (below[-1], above[0]) if below and above else (above or below)[:2]
        return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """One (K, B) on known text: how many chain tokens each round accepted, and whether its outcome was prepared."""

    depth: int
    branches: int
    accepted: tuple[int, ...]
    hits: tuple[bool, ...]

    @property
    def tokens(self) -> float:
        """E[tokens] of a round, bonus included."""
        return 1.0 + statistics.fmean(self.accepted)

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(self.hits)

    def acceptance(self, position: int) -> float:
        """How often chain token `position` held, given that those before it did."""
        tried = sum(accepted >= position for accepted in self.accepted)
        return sum(accepted > position for accepted in self.accepted) / tried if tried else 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What one machine and pair can do, milliseconds.

    `step_ms` is a run-ahead token of the target; `tree_ms` a depth by its branches; `link_ms` a drafter's answer beyond
    its work.
    """

    step_ms: float
    verify_ms: Curve
    chain_ms: Curve
    tree_ms: Curve
    link_ms: float
    trials: tuple[Trial, ...]


def probe(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    depths: Sequence[int],
    branches: Sequence[int],
    tell: Callable[[str], None],
) -> Probe:
    """Measures on the text the target itself says after each of `prompts`.

    Raises:
        WorkerError: there is no drafter, or a worker was lost.
    """
    bench.need_drafter()
    texts, steps = [], []
    for index, prompt in enumerate(prompts):
        tell(f"probe: text {index + 1} of {len(prompts)}")
        text, spans = bench.text(prompt, TEXT_TOKENS, sampling)
        texts.append((len(prompt), text))
        steps += _cadence(spans)
    start, text = texts[0]
    tell("probe: cost of verifying")
    verify_ms = _verify_curve(bench, start, text, sampling)
    tell("probe: cost of drafting")
    chain_ms, link_ms = _chain_curve(bench, start, text, sampling, max(depths))
    tree_ms = _tree_curve(bench, start, text, sampling, branches)
    trials = []
    for depth in depths:
        for count in branches:
            tell(f"probe: acceptance and hits, K = {depth}, B = {count}")
            trials.append(_trial(bench, texts, sampling, depth, count))
    return Probe(statistics.median(steps), verify_ms, chain_ms, tree_ms, link_ms, tuple(trials))


def _cadence(spans: Sequence[Span]) -> list[float]:
    """Milliseconds from one run-ahead token to the next."""
    ends = [span.ended_ns for span in spans]
    return [(after - before) / 1e6 for before, after in pairwise(ends)]


def _verify_curve(bench: Workbench, start: int, text: Sequence[int], sampling: SamplingParams) -> Curve:
    """c(M), the row counts in turn, so that a drifting machine drifts for all alike."""
    times: dict[int, list[float]] = {rows: [] for rows in VERIFY_ROWS}
    for _ in range(REPEATS):
        bench.open(text[:start], sampling, target=True, drafter=False)
        base_len = start + 1
        for number, rows in enumerate(VERIFY_ROWS, 1):
            outcome = bench.verify(number, base_len, text[base_len : base_len + rows - 1])
            times[rows].append(_ms(outcome.work))
            base_len += outcome.accepted + 1
        bench.close()
    return Curve(tuple((rows, statistics.median(times[rows])) for rows in VERIFY_ROWS))


def _chain_curve(
    bench: Workbench, start: int, text: Sequence[int], sampling: SamplingParams, deepest: int
) -> tuple[Curve, float]:
    """Just-in-time chains by their length, and the link."""
    points, links = [], []
    for depth in range(1, deepest + 1):
        bench.open(text[:start], sampling, target=False, drafter=True)
        times = []
        for number in range(1, REPEATS + WARM_UP + 1):
            at = start + number * 2
            drafted, whole_ms = bench.chain(number, at, text[at - 2 : at] if number > 1 else text[start:at], depth)
            times.append(_ms(drafted.work))
            links.append(whole_ms - times[-1])
        points.append((depth, statistics.median(times[WARM_UP:])))
        bench.close()
    return Curve(tuple(points)), statistics.median(links)


def _tree_curve(
    bench: Workbench, start: int, text: Sequence[int], sampling: SamplingParams, branches: Sequence[int]
) -> Curve:
    """One depth of the tree by its number of branches: the middle forwards of a round, where all of them grow."""
    points = []
    for count in branches:
        bench.open(text[:start], sampling, target=False, drafter=True)
        times = []
        for number in range(1, REPEATS + WARM_UP + 1):
            at = start + number
            _, spans = bench.work_ahead(number, at, text[at - 1 : at], (), 4, count)
            times += [_ms(span) for span in spans[1:] if number > WARM_UP]
        points.append((count, statistics.median(times)))
        bench.close()
    return Curve(tuple(points))


def _trial(
    bench: Workbench, texts: Sequence[tuple[int, Sequence[int]]], sampling: SamplingParams, depth: int, count: int
) -> Trial:
    """Rounds as SSD makes them, at full depth: a hit verifies the branch, a miss a just-in-time chain."""
    accepted, hits = [], []
    for start, text in texts:
        bench.open(text[:start], sampling, target=False, drafter=True)
        told, at, number = start, start + 1, 1
        chain = bench.chain(number, at, text[told:at], depth)[0].chain
        told = at
        while at + depth + 1 < len(text):
            branches, _ = bench.work_ahead(number, at, text[told:at], chain, depth, count)
            held = _held(chain, text[at:])
            branch = _prepared(branches, held, text[at + held])
            accepted.append(held)
            hits.append(branch is not None)
            told, at, number = at, at + held + 1, number + 1
            if branch is not None:
                chain = branch.chain
            elif at + depth + 1 < len(text):
                chain = bench.chain(number, at, text[told:at], depth)[0].chain
                told = at
        bench.close()
    return Trial(depth, count, tuple(accepted), tuple(hits))


def _held(chain: Sequence[int], text: Sequence[int]) -> int:
    return next((i for i, (own, true) in enumerate(zip(chain, text, strict=False)) if own != true), len(chain))


def _prepared(branches: Sequence[Branch], accepted: int, bonus: int) -> Branch | None:
    return next((branch for branch in branches if (branch.accepted, branch.bonus) == (accepted, bonus)), None)


def _ms(span: Span) -> float:
    return (span.ended_ns - span.started_ns) / 1e6
