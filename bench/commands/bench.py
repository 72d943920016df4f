"""Compares AR, SD, SSD and auto with other engines on the same weights and prompts, in interleaved runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.bench.commands import concurrency, files, suite
from outrider.bench.commands.files import numbers
from outrider.bench.comparison import report
from outrider.bench.comparison.contention import Contention
from outrider.bench.comparison.peers import ChosenPeers, choose
from outrider.bench.comparison.runners import (
    BASELINE,
    BOTH_CORES,
    FEWEST_TRIAL_PROMPTS,
    TRIAL_PROMPTS,
    RunnerFamilies,
    main_table_runs,
    second_table_runs,
    start_runners,
)
from outrider.bench.comparison.runs import PromptRunner, Run, run_interleaved
from outrider.bench.comparison.summary import RunnerSummary, compare_all, lines, summaries_of
from outrider.bench.timing.loops import IsolatedTimes, Stopwatch
from outrider.bench.timing.workbench import Workbench, workbench
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import writable_folder
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

COMMON = (
    "--prompts", "--classes", "--temps", "--depths", "--max-tokens", "--suite", "--peers", "--out", "--concurrency",
    "--rounds", "--model", "--draft-model", "--branches",
)  # fmt: skip
UNUSED = (*flags.OF_MANY_REQUESTS, "colocate", "ngrams", "memory", "trace")
"""Bench itself runs SD colocated, and with and without n-grams; several clusters can't share a trace."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench")
    group.add_argument("--prompts", type=int, metavar="N", help="prompts per class (default: 24; with --suite 6)")
    files.add_flags(group)
    group.add_argument("--temps", default="0,0.8", metavar="T,T,...", help="temperatures (default: 0,0.8)")
    depths = "values of K to try for SD, SSD and mlx-lm (default: 2,3,4; with --suite 1,2,3)"
    group.add_argument("--depths", metavar="K,K,...", help=depths)
    length = "tokens to generate in each run (default: 128)"
    group.add_argument("--max-tokens", "-m", "-n", type=int, default=128, metavar="N", help=length)
    peers = "engines to compare with: llama.cpp,mlx-lm or one of these, or none (default: all that are installed)"
    group.add_argument("--peers", metavar="NAME,NAME", help=peers)
    group.add_argument("--both-cores", action="store_true", help="add a table of AR, SD and mlx-lm with both cores")
    group.add_argument("--contended", action="store_true", help="keep the target's device busy with another process")
    results = "folder for bench.json and bench.png (default: out)"
    group.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help=results)
    concurrency.add_flags(parser)
    flags.add_request_flags(parser, ("mode", "num_draft_tokens", "drafter"))
    flags.add_cluster_flags(parser, UNUSED)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The checked plan of a bench. `prompts` are measured; K is chosen on `trials`. Both by class."""

    prompts: dict[str, list[tuple[int, ...]]]
    trials: dict[str, list[tuple[int, ...]]]
    samplings: list[SamplingParams]
    depths: list[int]
    peers: ChosenPeers
    both_cores: bool


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    pair = choose_pair(ServeSettings(**flags.settings_of(options)))
    if pair.settings.drafts_by_head:
        raise InvalidRequest("bench does not support heads yet; use another draft_backend")
    values.whole("max_tokens", options.max_tokens, 2, 1 << 20)
    temps = numbers("temps", options.temps, float)
    samplings = [SamplingParams(max_tokens=options.max_tokens, temp=temp, ignore_eos=True) for temp in temps]
    if options.concurrency is not None:
        return concurrency.run(options, pair, samplings)
    for name in ("modes", "rounds", "each"):
        if getattr(options, name) is not None:
            raise InvalidRequest(f"{name} is only used with concurrency")
    if options.suite is not None:
        return suite.run(options, pair, samplings)
    plan, out = _plan(options, pair, samplings), writable_folder(options.out, "choose another --out")
    screen = Screen()
    sections, raw = [], {}
    with _started(options, plan, pair, screen) as session:
        for kind, prompts in plan.prompts.items():
            for sampling in plan.samplings:
                found, runs = session.run(kind, prompts, sampling)
                sections += found
                raw[f"{kind} T={sampling.temp:g}"] = {name: [_plain(run) for run in runs[name]] for name in runs}
                screen.clear()
                for section in found:
                    print(report.table(section) + "\n", flush=True)
    title = f"outrider bench: K chosen per family, B = {pair.settings.breadth}"
    results = {"sections": [asdict(found) for found in sections], "runs": raw}
    files.write(out, "bench", title, pair.settings, results, lambda path: report.draw(sections, path, title))
    for note in plan.peers.left_out:
        print(note)
    return 0


def _plan(options: argparse.Namespace, pair: ChosenPair, samplings: list[SamplingParams]) -> BenchPlan:
    """Returns the plan that the flags describe.

    Raises:
        InvalidRequest: a flag is invalid, or a class of prompts or a peer is missing.
    """
    depths = files.depths_of(options.depths or "2,3,4")
    peers = choose(options.peers, pair.settings, options.model, options.draft_model)
    count = 24 if options.prompts is None else options.prompts
    available = files.of_classes(options, pair, ("code",))
    chosen = {kind: _first(kind, available[kind], count) for kind in available}
    trials = {kind: tokens[count:] for kind, tokens in chosen.items()}
    prompts = {kind: tokens[:count] for kind, tokens in chosen.items()}
    return BenchPlan(prompts, trials, samplings, depths, peers, options.both_cores)


@dataclass(frozen=True, slots=True)
class BenchSession:
    """All processes of a bench. `bench`: workers that are timed in isolation; None without a draft worker."""

    plan: BenchPlan
    settings: ServeSettings
    families: RunnerFamilies
    bench: Workbench | None
    conditions: str
    tell: Callable[[str], None]

    def run(
        self, kind: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> tuple[list[report.Section], dict[str, list[Run]]]:
        """Returns the tables of one class at one temperature, and the runs."""
        best = self.families.best(self.plan.trials[kind], sampling, self.tell)
        stopwatch = Stopwatch(self.bench, self.plan.depths, self.settings.breadth) if self.bench else None
        runs = run_interleaved(best, prompts, sampling, self.tell, stopwatch.sample if stopwatch else None)
        alone = stopwatch.read() if stopwatch else None
        return self._sections(kind, sampling.temp, runs, best, alone), runs

    def _sections(
        self,
        kind: str,
        temp: float,
        runs: dict[str, list[Run]],
        best: Sequence[PromptRunner],
        alone: IsolatedTimes | None,
    ) -> list[report.Section]:
        threads = self.settings.threads
        main, subjects = main_table_runs(runs), summaries_of(best, runs, BOTH_CORES)
        comparison = compare_all(subjects, alone) if alone else {}
        notes = self._notes(alone, subjects)
        here = f"{threads} BLAS thread{'s' * (threads > 1)} per worker{self.conditions}"
        found = [report.section(kind, temp, here, main, BASELINE, comparison, notes)]
        if self.plan.both_cores:
            there = f"{BOTH_CORES[2:]}: {2 * threads} BLAS threads, not pinned; others as above{self.conditions}"
            second = second_table_runs(runs)
            found.append(report.section(kind, temp, there, second, BASELINE + BOTH_CORES, {}))
        return found

    def _notes(self, alone: IsolatedTimes | None, subjects: Sequence[RunnerSummary]) -> list[str]:
        if alone is None:
            return ["- no draft worker: no step was timed in isolation, so there is no prediction"]
        return lines(alone, subjects, self.settings.breadth, self.families.weight_bytes)


@contextmanager
def _started(options: argparse.Namespace, plan: BenchPlan, pair: ChosenPair, screen: Screen) -> Iterator[BenchSession]:
    settings = pair.settings
    given = flags.settings_of(options)
    with ExitStack() as stack:
        started = stack.enter_context(
            start_runners(given, settings, plan.depths, plan.both_cores, plan.peers, screen.show)
        )
        bench = None
        if settings.has_draft_worker:
            bench = stack.enter_context(workbench(settings, screen.show))
        conditions = ""
        if options.contended:
            conditions = "; " + stack.enter_context(Contention(settings)).describe()
        yield BenchSession(plan, settings, started, bench, conditions, screen.show)


def _first(kind: str, prompts: list[files.Tokens], count: int) -> list[files.Tokens]:
    """Returns the first `count` prompts, followed by the prompts of the trial."""
    most = len(prompts) - FEWEST_TRIAL_PROMPTS
    if not 1 <= count <= most:
        raise InvalidRequest(
            f"prompts is {count}; expected 1 to {most}: the class {kind} has {len(prompts)}, and"
            f" {FEWEST_TRIAL_PROMPTS} are needed to choose K"
        )
    return prompts[: count + TRIAL_PROMPTS]


def _plain(run: Run) -> dict[str, Any]:
    timings = run.timings
    return {
        "tokens": len(run.tokens),
        "seconds": run.timed.seconds,
        "hits": timings.cache_hits if timings else None,
        "misses": timings.cache_misses if timings else None,
        "turnaround_ms": list(timings.turnaround_ms) if timings else None,
    }
