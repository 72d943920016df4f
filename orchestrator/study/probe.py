"""A probe of about a minute: what each thing costs and how often it succeeds.

Drives the real workers over the target's own text. Times are alone unless a name says otherwise. Nothing here is a
prediction; see `orchestrator.study.forecast`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.orchestrator.study.curve import Curve, medians, milliseconds
from outrider.orchestrator.study.trial import Text, Trial, trial
from outrider.orchestrator.study.workbench import Workbench
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

VERIFY_ROWS = (*range(1, 17),)
REPEATS = 12
TEXT_TOKENS = 160
# Rounds that a drafter's first work, cold caches included, may spoil.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """What one machine and pair can do, milliseconds.

    `step_ms` is a run-ahead token of the target; `chain_ms` a chain drafted right after another; `tree_ms` a depth by
    its branches; `link_ms` a drafter's answer beyond its work. `turn_ms(K)` is a whole round of SD: a drafter that has
    waited drafts slower than one that has not; `between_ms` is the target's wait in it beyond the chain's time. The
    trials tell what a verify takes beside the drafter.
    """

    step_ms: float
    verify_ms: Curve
    chain_ms: Curve
    tree_ms: Curve
    link_ms: float
    turn_ms: Curve
    between_ms: float
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
    texts: list[Text] = []
    steps: list[float] = []
    for index, prompt in enumerate(prompts):
        tell(f"probe: text {index + 1} of {len(prompts)}")
        text, spans = bench.text(prompt, TEXT_TOKENS, sampling)
        texts.append((len(prompt), text))
        steps += cadence(spans)
    tell("probe: cost of verifying")
    verify_ms = _verify_curve(bench, texts[0], sampling)
    tell("probe: cost of drafting")
    chain_ms, link_ms = _chain_curve(bench, texts[0], sampling, max(depths))
    tree_ms = _tree_curve(bench, texts[0], sampling, branches)
    tell("probe: verify and draft in turn")
    turn_ms, between_ms = _turn_curve(bench, texts[0], sampling, depths)
    trials = []
    for depth in depths:
        for count in branches:
            tell(f"probe: acceptance and hits, K = {depth}, B = {count}")
            trials.append(trial(bench, texts, sampling, depth, count))
    return Probe(statistics.median(steps), verify_ms, chain_ms, tree_ms, link_ms, turn_ms, between_ms, tuple(trials))


def cadence(spans: Sequence[Span]) -> list[float]:
    """Milliseconds from one run-ahead token to the next."""
    ends = [span.ended_ns for span in spans]
    return [(after - before) / 1e6 for before, after in pairwise(ends)]


def _verify_curve(bench: Workbench, known: Text, sampling: SamplingParams) -> Curve:
    """c(M), the row counts in turn, so that a drifting machine drifts for all alike."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        bench.open(text[:start], sampling, target=True, drafter=False)
        base_len = start + 1
        for number, rows in enumerate(VERIFY_ROWS, 1):
            outcome = bench.verify(number, base_len, text[base_len : base_len + rows - 1])
            times[len(text[base_len : base_len + rows - 1]) + 1].append(milliseconds(outcome.work))
            base_len += outcome.accepted + 1
        bench.close()
    return medians(times)


def _chain_curve(bench: Workbench, known: Text, sampling: SamplingParams, deepest: int) -> tuple[Curve, float]:
    """Just-in-time chains by their length, and the link."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    links = []
    for depth in range(1, deepest + 1):
        bench.open(text[:start], sampling, target=False, drafter=True)
        for number in range(1, REPEATS + WARM_UP + 1):
            at = start + number * 2
            drafted, whole_ms = bench.chain(number, at, text[at - 2 : at] if number > 1 else text[start:at], depth)
            work_ms = milliseconds(drafted.work)
            links.append(whole_ms - work_ms)
            if number > WARM_UP:
                times[depth].append(work_ms)
        bench.close()
    return medians(times), statistics.median(links)


def _tree_curve(bench: Workbench, known: Text, sampling: SamplingParams, branches: Sequence[int]) -> Curve:
    """One depth of the tree by its number of branches: the middle forwards of a round, where all of them grow."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    for count in branches:
        bench.open(text[:start], sampling, target=False, drafter=True)
        for number in range(1, REPEATS + WARM_UP + 1):
            at = start + number
            _, spans = bench.work_ahead(number, at, text[at - 1 : at], (), 4, count)
            times[count] += [milliseconds(span) for span in spans[1:] if number > WARM_UP]
        bench.close()
    return medians(times)


def _turn_curve(bench: Workbench, known: Text, sampling: SamplingParams, depths: Sequence[int]) -> tuple[Curve, float]:
    """Rounds of SD by K, the chain drafted, then one as long verified: from one verify's end to the next's; and the
    wait between them that is not the chain's."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    between = []
    for depth in depths:
        bench.open(text[:start], sampling, target=True, drafter=True)
        told, at, ended_ns = start, start + 1, 0
        for number in range(1, REPEATS + WARM_UP + 1):
            if at + depth >= len(text):
                break
            _, whole_ms = bench.chain(number, at, text[told:at], depth)
            outcome = bench.verify(number, at, text[at : at + depth])
            if number > WARM_UP:
                between.append(max(outcome.idle_ns / 1e6 - whole_ms, 0.0))
                times[depth].append((outcome.work.ended_ns - ended_ns) / 1e6)
            told, at, ended_ns = at, at + outcome.accepted + 1, outcome.work.ended_ns
        bench.close()
    return medians(times), statistics.median(between)
