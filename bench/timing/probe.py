"""A probe of about a minute: what each thing costs and how often it succeeds.

Drives the real workers over the target's own text. Times are alone unless a name says otherwise. Nothing here is a
prediction; see `outrider.bench.timing.forecast`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.timing.curve import Curve, medians, milliseconds
from outrider.bench.timing.hourglass import Hourglass
from outrider.bench.timing.trial import Text, Trial, trial
from outrider.bench.timing.workbench import Workbench
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

# About so long it may take once the workers are there, whatever the machine and the draft.
SECONDS = 50.0
# By when, in parts of the whole, each thing is measured.
TEXTS_BY, VERIFY_BY, CHAINS_BY, TREES_BY, TURNS_BY, PILOT_BY = 0.2, 0.3, 0.36, 0.42, 0.48, 0.8
VERIFY_ROWS = (*range(1, 17),)
REPEATS = 12
FEWEST_REPEATS = 3
FEWEST_TEXTS = 2
TEXT_TOKENS = 160
FEWEST_TOKENS = 64
# Tokens of each text that a trial goes over at least; at most in the first, which tells for how many there is time.
FEWEST_TRIED = 16
PILOT_TOKENS = 48
# Rounds that a drafter's first work, cold caches included, may spoil.
WARM_UP = 2
# Speculation that brings less than this times plain decoding is not worth another process.
WORTH_IT = 1.03


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
    """Measures on the text the target itself says after each of `prompts`, less often where the time runs out.

    Where no K could pay even if drafting took no time, one trial tells that and is the only one.

    Raises:
        WorkerError: there is no drafter, or a worker was lost.
    """
    bench.need_drafter()
    glass = Hourglass(SECONDS)
    texts, steps = _texts(bench, prompts, sampling, glass, tell)
    tell("probe: cost of verifying")
    verify_ms = _verify_curve(bench, texts[0], sampling, glass)
    step_ms = min(statistics.median(steps), verify_ms(1))  # where it is not, other work was in the way
    tell("probe: cost of drafting")
    chain_ms, link_ms = _chain_curve(bench, texts[0], sampling, max(depths), glass)
    tree_ms = _tree_curve(bench, texts[0], sampling, branches, glass)
    tell("probe: verify and draft in turn")
    turn_ms, between_ms = _turn_curve(bench, texts[0], sampling, depths, glass)
    tell("probe: acceptance")
    pilot, tokens_a_second = _pilot(bench, texts, sampling, max(depths), max(branches), turn_ms, glass)
    trials = [pilot]
    if may_pay(pilot, step_ms, verify_ms):
        ways = [(depth, count) for count in reversed(branches) for depth in depths]
        tokens = min(int(tokens_a_second * glass.left() / len(ways) / len(texts)), TEXT_TOKENS)
        trials.clear()
        for turn in glass.turns(len(ways), len(depths), 1.2):
            depth, count = ways[turn]
            tell(f"probe: acceptance and hits, K = {depth}, B = {count}")
            trials.append(trial(bench, texts, sampling, depth, count, max(tokens, FEWEST_TRIED)))
    return Probe(step_ms, verify_ms, chain_ms, tree_ms, link_ms, turn_ms, between_ms, tuple(trials))


def may_pay(tried: Trial, step_ms: float, verify_ms: Curve) -> bool:
    """Whether some K up to the trial's would, if every chain were there for nothing when it is wanted."""

    def rate(depth: int) -> float:
        return (1.0 + statistics.fmean(min(t.in_full, depth) for t in tried.rounds)) / verify_ms(depth + 1)

    return max(rate(depth) for depth in range(1, tried.depth + 1)) > WORTH_IT / step_ms


def _texts(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    glass: Hourglass,
    tell: Callable[[str], None],
) -> tuple[list[Text], list[float]]:
    """What the target says after each prompt, shorter where it is slow, and what its tokens took."""
    texts: list[Text] = []
    steps: list[float] = []
    length = FEWEST_TOKENS
    for index in glass.turns(len(prompts), FEWEST_TEXTS, TEXTS_BY):
        tell(f"probe: text {index + 1} of {len(prompts)}")
        if steps:
            affordable = 1000 * glass.left(TEXTS_BY) / (len(prompts) - index) / statistics.median(steps)
            length = min(max(int(affordable), FEWEST_TOKENS), TEXT_TOKENS)
        text, spans = bench.text(prompts[index], length, sampling)
        texts.append((len(prompts[index]), text))
        steps += cadence(spans)
    return sorted(texts, key=lambda known: known[0] - len(known[1])), steps


def _pilot(
    bench: Workbench,
    texts: Sequence[Text],
    sampling: SamplingParams,
    depth: int,
    branches: int,
    turn_ms: Curve,
    glass: Hourglass,
) -> tuple[Trial, float]:
    """A short trial, for which there is time even if each round brings one token, and how many tokens of text such a
    one gets through in a second."""
    before_s = glass.left()
    affordable = 1000 * glass.left(PILOT_BY) / (turn_ms(depth) * len(texts))
    found = trial(bench, texts, sampling, depth, branches, min(max(int(affordable), FEWEST_TRIED), PILOT_TOKENS))
    tokens = sum(1 + tried.accepted for tried in found.rounds)
    return found, tokens / max(before_s - glass.left(), 1e-3)


def cadence(spans: Sequence[Span]) -> list[float]:
    """Milliseconds from one run-ahead token to the next."""
    ends = [span.ended_ns for span in spans]
    return [(after - before) / 1e6 for before, after in pairwise(ends)]


def _verify_curve(bench: Workbench, known: Text, sampling: SamplingParams, glass: Hourglass) -> Curve:
    """c(M), the row counts in turn, so that a drifting machine drifts for all alike."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    for _ in glass.turns(REPEATS, FEWEST_REPEATS, VERIFY_BY):
        bench.open(text[:start], sampling, target=True, drafter=False)
        base_len = start + 1
        for number, rows in enumerate(VERIFY_ROWS, 1):
            outcome = bench.verify(number, base_len, text[base_len : base_len + rows - 1])
            times[len(text[base_len : base_len + rows - 1]) + 1].append(milliseconds(outcome.work))
            base_len += outcome.accepted + 1
        bench.close()
    return medians(times)


def _chain_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, deepest: int, glass: Hourglass
) -> tuple[Curve, float]:
    """Just-in-time chains by their length, and the link."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    links = []
    for depth in range(1, deepest + 1):
        bench.open(text[:start], sampling, target=False, drafter=True)
        for number in _numbers(glass, CHAINS_BY):
            at = start + number * 2
            drafted, whole_ms = bench.chain(number, at, text[at - 2 : at] if number > 1 else text[start:at], depth)
            work_ms = milliseconds(drafted.work)
            links.append(whole_ms - work_ms)
            if number > WARM_UP:
                times[depth].append(work_ms)
        bench.close()
    return medians(times), statistics.median(links)


def _tree_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, branches: Sequence[int], glass: Hourglass
) -> Curve:
    """One depth of the tree by its number of branches: the middle forwards of a round, where all of them grow."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    for count in branches:
        bench.open(text[:start], sampling, target=False, drafter=True)
        for number in _numbers(glass, TREES_BY):
            at = start + number
            _, spans = bench.work_ahead(number, at, text[at - 1 : at], (), 4, count)
            times[count] += [milliseconds(span) for span in spans[1:] if number > WARM_UP]
        bench.close()
    return medians(times)


def _turn_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, depths: Sequence[int], glass: Hourglass
) -> tuple[Curve, float]:
    """Rounds of SD by K, the chain drafted, then one as long verified: from one verify's end to the next's; and the
    wait between them that is not the chain's."""
    start, text = known
    times: defaultdict[int, list[float]] = defaultdict(list)
    between = []
    for depth in depths:
        bench.open(text[:start], sampling, target=True, drafter=True)
        told, at, ended_ns = start, start + 1, 0
        for number in _numbers(glass, TURNS_BY):
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


def _numbers(glass: Hourglass, share: float) -> Iterator[int]:
    """Round numbers from 1: those that warm up, then those that count."""
    return (turn + 1 for turn in glass.turns(REPEATS + WARM_UP, FEWEST_REPEATS + WARM_UP, share))
