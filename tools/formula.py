"""Compares the measured rates of AR, SD and SSD with the formula's prediction (`core/policy/forecasts.py`).

    python -m tools.formula                                 # code prompts, T = 0 and 0.8, K = 2, 3, 4
    python -m tools.formula --classes code,prose --depths 3 --prompts 6

The formula takes times in isolation, and from the run only chain lengths, tokens per round, the share of chains on
request, and the median turnaround. A second pair of workers is timed between the runs, one process at a time, so that
drift of the machine affects both equally. Prints for each runner a round as measured and as predicted; also c(M), T_p,
T_SD and the upper bound of SSD over SD.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

from outrider.bench.commands import files
from outrider.bench.commands.files import parse_numbers
from outrider.bench.comparison.runs import Summary, median_by_number, run_interleaved, summarize
from outrider.orchestrator.cli import flags, run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.policy.forecasts import Costs, RoundKind, ar_rate, mixed_rate
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings, check_setting
from outrider.protocol import clock, values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Commit, Drafted, Timings
from outrider.protocol.sampling import SamplingParams
from tools.latency import Latency
from tools.turnarounds import TurnaroundRunner, median_turnaround
from tools.workbench import REQUEST_ID, WARM_UP_ROUNDS, KnownText, Workbench, workbench

# Rounds of each kind in a sample.
ROUNDS_PER_SAMPLE = 2
# Row counts to time beyond K+1, because n-grams may extend a chain.
EXTRA_ROW_COUNTS = (12, 16)


@dataclass(frozen=True, slots=True)
class IsolatedTimes:
    """Medians in milliseconds. `step_ms`: a token of autonomous plain decoding. `chain_ms(K)`: a chain from request to
    answer. `ahead_ms(K)`: the work ahead, all branches K deep. `between_ms`: the target's wait in SD beyond the chain's
    time."""

    step_ms: float
    verify_ms: Latency
    chain_ms: Latency
    ahead_ms: Latency
    between_ms: float

    def costs(self, turnaround_ms: float | None = None) -> Costs:
        """Returns costs for the formula. `turnaround_ms`: the turnaround of the run's hits; None: `between_ms`."""
        usual_ms = self.between_ms if turnaround_ms is None else turnaround_ms
        more_ms = max(self.between_ms - usual_ms, 0.0)  # a chain on request also waits for this long
        return Costs(
            self.step_ms, self.verify_ms, lambda depth: self.chain_ms(depth) + more_ms, self.ahead_ms, usual_ms
        )


def _median_latency(samples: Iterable[tuple[int, float]]) -> Latency:
    return Latency(tuple(median_by_number(samples).items()))


class Stopwatch:
    """Collects samples with all `depths` and B = `branches`. One process works at a time; a chain is requested right
    after a verify, as in SD."""

    def __init__(self, bench: Workbench, depths: Sequence[int], branches: int) -> None:
        self._bench = bench
        self._depths = sorted({1, *depths})
        self._branches = branches
        self._steps: list[float] = []
        self._between: list[float] = []
        self._verify: list[tuple[int, float]] = []
        self._chain: list[tuple[int, float]] = []
        self._ahead: list[tuple[int, float]] = []

    def sample(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Takes a sample of each kind over the text that the target generates after `prompt`, in a few seconds. Plain
        steps are timed along the whole text, the rest from its middle, where the context has the mean length of a run.

        Raises:
            WorkerError: a worker was lost.
        """
        bench, endless = self._bench, replace(sampling, max_tokens=1 << 20)
        rows = [*range(1, self._depths[-1] + 2), *(more for more in EXTRA_ROW_COUNTS if more > self._depths[-1] + 1)]
        needed = max((WARM_UP_ROUNDS + ROUNDS_PER_SAMPLE) * (self._depths[-1] + 1), rows[-1]) + 2
        length = max(sampling.max_tokens, 2 * needed)
        text, spans = bench.text(prompt, length, endless)
        self._steps += [(after.ended_ns - before.ended_ns) / 1e6 for before, after in pairwise(spans)]
        known = (len(prompt) + length // 2, text)
        self._verify += time_verifies(bench, known, endless, rows * ROUNDS_PER_SAMPLE)
        for depth in self._depths:
            for chain_ms, between_ms in time_chains(bench, known, endless, depth):
                self._chain.append((depth, chain_ms))
                self._between.append(between_ms)
            work = partial(bench.work_ahead, depth=depth, branches=self._branches)
            ahead = bench.rounds(known, endless, depth, ROUNDS_PER_SAMPLE, work, target=False)
            self._ahead += [(depth, span.milliseconds) for span in ahead]

    def read(self) -> IsolatedTimes:
        """Returns the medians of all samples, of which at least one is needed."""
        return IsolatedTimes(
            statistics.median(self._steps),
            _median_latency(self._verify),
            _median_latency(self._chain),
            _median_latency(self._ahead),
            statistics.median(self._between),
        )


def time_verifies(
    bench: Workbench, known: KnownText, sampling: SamplingParams, rows: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Yields rows and milliseconds of verifies with these row counts, one after another. At the text's end, the request
    starts again after the prompt."""
    (start, text), number, at = known, 0, len(known[1])
    for count in rows:
        if at + count > len(text):
            if number:
                bench.close()
            bench.open(text[:start], sampling, target=True, drafter=False)
            number, at = 1, start + 2 + bench.verify(1, start + 1, ()).accepted
        number += 1
        outcome = bench.verify(number, at, text[at : at + count - 1])
        yield count, outcome.work.milliseconds
        at += outcome.accepted + 1
    bench.close()


def time_chains(
    bench: Workbench, known: KnownText, sampling: SamplingParams, depth: int
) -> Iterator[tuple[float, float]]:
    """Alternates a chain on request with a verify of the same length. A drafter that has waited is slower.

    Yields the milliseconds of each chain from request to answer, and of the target's wait beyond it.
    """
    start, text = known
    bench.open(text[:start], sampling, target=True, drafter=True)
    sent, at = start, start + 1
    for number in range(1, WARM_UP_ROUNDS + ROUNDS_PER_SAMPLE + 1):
        if at + depth >= len(text):
            break
        asked_ns = clock.now()
        bench.send_drafters(Commit(REQUEST_ID, 0, number, at, tuple(text[sent:at]), None, depth, 0))
        bench.wait(Drafted)
        chain_ms = (clock.now() - asked_ns) / 1e6
        outcome = bench.verify(number, at, text[at : at + depth])
        if number > WARM_UP_ROUNDS:
            yield chain_ms, max(outcome.idle_ns / 1e6 - chain_ms, 0.0)
        sent, at = at, at + outcome.accepted + 1
    bench.close()


@dataclass(frozen=True, slots=True)
class RunnerResult:
    """The runs of a runner. `rows[M]` counts verifies of M tokens. `turnaround_ms`: the median; None without hits."""

    found: Summary
    rows: tuple[int, ...]
    turnaround_ms: float | None = None

    @property
    def tokens(self) -> float:
        """The tokens of a round."""
        return self.found.tokens / self.found.rounds

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1000 * self.found.tokens / self.found.sums.predicted_ms


def summarize_timings(timings: Sequence[Timings], turnaround_ms: float | None = None) -> RunnerResult:
    found = summarize(timings)
    longest = [*found.sums.drafted_by_position, 0]
    chains = [longer - shorter for longer, shorter in pairwise(longest)]
    rows = (0, max(found.rounds - sum(chains), 0), *chains)
    return RunnerResult(found, rows, turnaround_ms)


@dataclass(frozen=True, slots=True)
class FormulaComparison:
    """A round as measured and as predicted, in milliseconds; rates in tokens per second.

    `verify_ms` is the run's mean verify, `verify_alone_ms` the mean of the same verifies in isolation; `between_ms` and
    `between_alone_ms` are the target's waits before them.
    """

    measured: float
    predicted: float
    verify_ms: float
    verify_alone_ms: float
    between_ms: float
    between_alone_ms: float

    @property
    def share(self) -> float:
        """The measured rate divided by the predicted rate."""
        return self.measured / self.predicted


def compare_plain(run: RunnerResult, alone: IsolatedTimes) -> FormulaComparison:
    """Compares plain decoding: steps one after another, without waits."""
    step_ms = run.found.sums.predicted_ms / run.found.rounds
    return FormulaComparison(run.rate, 1000 * ar_rate(alone.costs()), step_ms, alone.step_ms, 0.0, 0.0)


def compare_speculative(run: RunnerResult, alone: IsolatedTimes, depth: int, works_ahead: bool) -> FormulaComparison:
    """Compares SD with this K, or SSD (`works_ahead`), with theorem 7 for the run's mix of rounds."""
    costs = alone.costs(run.turnaround_ms)
    kinds = round_kinds(run, depth, works_ahead)
    verify_alone_ms = sum(kind.share * alone.verify_ms(round(kind.rows)) for kind in kinds)
    predicted = mixed_rate(costs, kinds)
    return FormulaComparison(
        run.rate,
        1000 * predicted,
        run.found.sums.verify_ms / run.found.rounds,
        verify_alone_ms,
        run.found.sums.idle_ms / run.found.rounds,
        run.tokens / predicted - verify_alone_ms,
    )


def round_kinds(run: RunnerResult, depth: int, works_ahead: bool) -> list[RoundKind]:
    """Returns the run's rounds by verified rows. A chain on request counts with the mean length; a chain from the cache
    was drafted during the previous verify. Chains longer than K are n-grams, which cost nothing."""
    chains = sum(run.rows[2:])
    drafted = sum(count * min(rows - 1, depth) for rows, count in enumerate(run.rows) if rows > 1)
    mean = round(drafted / chains) if chains else 0
    requested_share = min(run.found.sums.draft_waits / run.found.rounds, 1.0)
    kinds = []
    for rows, count in enumerate(run.rows):
        share = count / run.found.rounds
        ahead = rows - 1 if works_ahead and rows <= depth + 1 else 0
        kinds.append(RoundKind(share * requested_share, rows, run.tokens, requested=mean))
        kinds.append(RoundKind(share * (1.0 - requested_share), rows, run.tokens, ahead=ahead))
    return [kind for kind in kinds if kind.share > 0]


def speedup_bound(costs: Costs, depth: int) -> float:
    """1 + T_SD: the upper bound of the speedup of SSD over SD with the same drafter and K."""
    return 1.0 + costs.chain_ms(depth) / costs.verify_ms(depth + 1)


def describe(alone: IsolatedTimes, depths: Sequence[int], branches: int) -> list[str]:
    """Returns a line with c(M), and one for each K with T_p, T_SD and the upper bound."""
    first, costs = alone.verify_ms(1), alone.costs()
    rows = ", ".join(f"{rows}: {ms / first:.2f}" for rows, ms in alone.verify_ms.points)
    lines = [
        f"in isolation: a token of plain decoding {alone.step_ms:.2f} ms; c(M), a verify of M tokens, {first:.2f} ms"
        f" times {rows}"
    ]
    for depth in depths:
        ahead, bound = costs.tree_ms(depth) / alone.verify_ms(depth + 1), speedup_bound(costs, depth)
        lines.append(
            f"in isolation, K = {depth}, B = {branches}: work ahead {alone.ahead_ms(depth):.2f} ms, T_p ="
            f" {ahead:.2f}; a chain {alone.chain_ms(depth):.2f} ms, T_SD = {bound - 1:.2f}; upper bound of SSD over SD:"
            f" {bound:.2f}x"
        )
    return lines


def format_comparison(name: str, run: RunnerResult, comparison: FormulaComparison) -> str:
    """Returns a runner's line: its round, and its rate as measured and as predicted."""
    slower = comparison.verify_ms / comparison.verify_alone_ms
    between = f" + between {comparison.between_ms:.2f} (predicted {comparison.between_alone_ms:.2f})"
    return (
        f"{name}: {comparison.measured:.1f} tok/s, {comparison.share:.2f} of the predicted {comparison.predicted:.1f};"
        f" a round of {run.found.sums.predicted_ms / run.found.rounds:.2f} ms = verify {comparison.verify_ms:.2f}"
        f" ({slower:.2f} times the {comparison.verify_alone_ms:.2f} in isolation)"
        f"{between if comparison.between_alone_ms else ''}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--classes", default="code", metavar="C,C,...", help="classes of prompts (default: code)")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="prompts per class (default: 24)")
    parser.add_argument("--temps", default="0,0.8", metavar="T,T,...", help="temperatures (default: 0,0.8)")
    parser.add_argument("--depths", default="2,3,4", metavar="K,K,...", help="values of K (default: 2,3,4)")
    length = "tokens to generate in each run (default: 128)"
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help=length)
    flags.add_request_flags(parser, ("mode", "num_draft_tokens", "drafter"))
    flags.add_cluster_flags(parser, (*flags.MULTI_REQUEST_SETTINGS, "drafters", "colocate", "memory", "trace"))


def run(options: argparse.Namespace) -> int:
    given, screen = flags.settings_of(options), Screen()
    pair = choose_pair(ServeSettings(**given))
    settings = pair.settings
    if settings.drafts_with_head or not settings.has_draft_worker:
        raise InvalidRequest(f"the formula describes draft workers; draft_backend {settings.draft_backend} has none")
    depths = [check_setting("num_draft_tokens", depth) for depth in parse_numbers("depths", options.depths, int)]
    length = values.check_int("max_tokens", options.max_tokens, 2, 1 << 20)
    count = values.check_int("prompts", options.prompts, 1, 1000)
    samplings = [
        SamplingParams(max_tokens=length, temp=temp, seed=0, ignore_eos=True)
        for temp in parse_numbers("temps", options.temps, float)
    ]
    texts, codec = files.load_prompts(files.TINY_FOLDER, options.classes.split(",")), load_codec(pair.target)
    classes = {kind: list(map(codec.encode, found)) for kind, found in texts.items()}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(progress=screen.show, **{**given, "memory": False}))
        bench, client = stack.enter_context(workbench(settings, screen.show)), cluster.client()
        arms: dict[str, tuple[str, int | None]] = {"ar": ("ar", None)}
        arms |= {f"{mode} K={k}": (mode, k) for mode in ("sd", "ssd") for k in depths}
        for (kind, prompts), sampling in product(classes.items(), samplings):
            stopwatch, timings = Stopwatch(bench, depths, settings.breadth), defaultdict[str, list[Timings]](list)
            runners = [(name, TurnaroundRunner(client, *arm)) for name, arm in arms.items()]
            for number, prompt in enumerate(prompts[:count]):
                screen.show(f"{kind} T={sampling.temp:g}, prompt {number + 1}")
                first = number % len(runners)
                order = dict([*runners[first:], *runners[:first]])
                for name, (found,) in run_interleaved(order, [prompt], sampling, lambda _: None).items():
                    timings[name] += [found.timings] if found.timings else []
                stopwatch.sample(prompt, sampling)
            alone = stopwatch.read()
            screen.clear()
            print("\n".join([f"{kind}, T = {sampling.temp:g}", *describe(alone, depths, settings.breadth)]))
            for name, runner in runners:
                mode, depth = arms[name]
                result = summarize_timings(timings[name], median_turnaround(runner.turnarounds_ms))
                comparison = (
                    compare_plain(result, alone)
                    if depth is None
                    else compare_speculative(result, alone, depth, works_ahead=mode == "ssd")
                )
                print(format_comparison(name, result, comparison), flush=True)
            print(flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
