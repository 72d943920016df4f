"""Measures this machine with this pair for about a minute, and recommends AR, SD or SSD, with K and B."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.bench.comparison.arms import PLAIN_ARM, ArmCosts, MeasuredArm, list_arms, measure_arms
from outrider.bench.comparison.runs import mode_runner, run_interleaved, target_stats, total_rate
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.model_files import ModelFiles, in_process_drafters
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import DRAFT_WORKER_SETTINGS, ServeSettings
from outrider.protocol.digest import CACHE_VARIABLE
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.heads import unique_names
from outrider.protocol.sampling import SamplingParams

PREFILL_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PREFILL_ROUNDS = 5
NEVER_PREFILL = 2**31 - 1
MAX_PREFILL_TIME_RATIO = 0.95  # a prefill worker pays if it takes less than this share of the target's time
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef load_settings(path):\n",
    "# Sorts a list of numbers.\ndef quicksort(values):\n",
)

# The lowest speedup that justifies another process.
MIN_SPEEDUP = 1.03

DEFAULT_VOCAB_SIZE = 256  # used if the model's configuration has none

COMMON = (
    "--temp", "--measure", "--model", "--draft-model", "--draft-backend", "--head", "--threads", "--prefill-workers",
    "--log-level",
)  # fmt: skip
UNUSED = (
    *flags.MULTI_REQUEST_SETTINGS, "colocate", "head_in", "ngrams", "ngram_table", "trees", "branch_depth",
    "prompt_cache", "memory", "trace",
)  # fmt: skip
"""Tune measures draft workers and heads on single requests without n-grams."""


def measure_prefill(settings: dict[str, Any], target: ModelFiles, show: Callable[[str], None]) -> tuple[int, str]:
    """Times random prompts in a cluster without a prefill worker, and in one with a prefill worker.

    Returns the shortest length from which on the worker is always faster (or `NEVER_PREFILL`), and a sentence.

    Raises:
        OutriderError: a cluster does not start.
    """
    context, vocab_size = target.context_length, target.vocab_size or DEFAULT_VOCAB_SIZE
    lengths = tuple(length for length in PREFILL_LENGTHS if length < context) or (context - 1,)
    without_drafter = {name: value for name, value in settings.items() if name not in DRAFT_WORKER_SETTINGS}
    alone = {**without_drafter, "prompt_cache": False, "draft_backend": "none", "mode": "ar"}
    first = SamplingParams(max_tokens=1, ignore_eos=True)

    def median_ms(client: Client, length: int) -> float:
        rng = np.random.default_rng(length)
        prompts = [rng.integers(0, vocab_size, length).tolist() for _ in range(PREFILL_ROUNDS + 1)]
        _, *times = [client.generate(tokens, first).timings.prompt_ms for tokens in prompts]  # the first one warms up
        return statistics.median(times)

    times = []
    for workers in (0, 1):
        show(f"tune: prefill by {'a prefill worker' if workers else 'the target'}")
        with LocalCluster(progress=show, **{**alone, "prefill_workers": workers, "prefill_from": 1}) as cluster:
            times.append([median_ms(cluster.client(), length) for length in lengths])
    rows, least = list(zip(lengths, *times, strict=True)), NEVER_PREFILL
    for length, own, worker in reversed(rows):
        if worker >= MAX_PREFILL_TIME_RATIO * own:
            break
        least = length
    verdict = "for no prompt" if least == NEVER_PREFILL else f"for prompts of at least {least} tokens"
    medians = "  ".join(f"{length}: {worker:.0f}, target {own:.0f} ms" for length, own, worker in rows)
    return least, f"a prefill worker is worth it {verdict} ({medians})"


def add_flags(parser: argparse.ArgumentParser) -> None:
    temp = "temperature to measure at (default: 0)"
    parser.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help=temp)
    parser.add_argument("--measure", action="store_true", help="on a CPU, also run auto with and without --colocate")
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    settings = ServeSettings(**flags.settings_of(options))
    pair = choose_pair(settings)
    if not pair.settings.needs_draft_model:
        raise InvalidRequest("tune needs a draft model; expected --draft-model, and a --draft-backend that uses it")
    SamplingParams(temp=options.temp)  # checks the temperature before anything starts
    path = tuning.tuning_path(pair.settings)
    ensure_writable(path.parent, f"set {CACHE_VARIABLE} to a writable folder")
    screen = Screen()
    try:
        found = _measure_arms(options, pair, screen)
        lines = _describe_costs(found)
        if options.measure:
            lines += _compare_placements(options, pair, screen)
        given = flags.settings_of(options)
        prefill = measure_prefill(given, pair.target, screen.show) if settings.prefill_workers else None
    except KeyboardInterrupt:
        screen.clear()
        say("outrider tune: interrupted; nothing was saved")
        raise
    screen.clear()
    print("\n".join(lines))
    record = found.record(options.temp)
    if prefill is not None:
        least, sentence = prefill
        print(sentence)
        record = replace(record, prefill_from=least)
    tuning.save(record, path)
    print(f"saved for --mode auto at {'T = 0' if options.temp == 0 else 'any T above 0'}: {path}")
    return 0


def _measure_arms(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> ArmCosts:
    """Returns the measured arms.

    Raises:
        WorkerError: nothing was drafted, or the target was restarted.
    """
    heads = unique_names(kind for kind, _ in in_process_drafters(pair.settings))
    sampling = SamplingParams(temp=options.temp, seed=7, ignore_eos=True)
    chosen = {**flags.settings_of(options), "ngrams": False, "memory": False}
    with LocalCluster(progress=screen.show, **chosen) as cluster:
        target = target_stats(cluster.client()).pid
        arms = list_arms(pair.settings.has_draft_worker, heads)
        texts = list(map(load_codec(pair.target).encode, PROMPTS))
        found = measure_arms(cluster.client(), arms, texts, sampling, lambda step: screen.show(f"tune: {step}"))
        if target_stats(cluster.client()).pid != target:
            raise WorkerError("nothing was saved, because the target was restarted meanwhile; run it again")
    if len(found.best_arms()) == 1:
        raise WorkerError(f"nothing was drafted: {'; '.join(cluster.notes) or 'all chains were empty'}")
    return found


def _describe_costs(found: ArmCosts) -> list[str]:
    one = found.verify_ms[1]
    lines = [
        f"one token of plain decoding  {found.step_ms:.2f} ms",
        f"verify of M tokens, alone    {one:.2f} ms times  {_format_points(found.verify_ms, one)}",
    ]
    if found.of("sd"):
        chains = f"{_format_points(found.chain_ms)} ms by length, including the link"
        lines += [
            f"chain after a verify         {chains}; link {found.link_ms:.2f} ms",
            f"next token of all branches   {_format_points(found.tree_ms)} ms by number of branches",
            f"turnaround of a hit          {found.turnaround_ms:.2f} ms",
        ]
    return [*lines, "", "measured in real rounds:", *map(_format_arm, found.best_arms()), _recommend(found)]


def _format_points(points: Mapping[int, float], unit: float = 1.0) -> str:
    return "  ".join(f"{at}: {ms / unit:.2f}" for at, ms in points.items())


def _format_arm(best: MeasuredArm) -> str:
    """Returns a line with an arm's K and B, its rate, and what decides it."""
    arm, summary = best.arm, best.summary
    sizes = " ".join(f"{name}={size}" for name, size in (("K", arm.depth), ("B", arm.branches)) if size)
    name = f"{' by '.join(filter(None, (arm.mode, arm.drafter)))} {sizes}"
    parts = [f"{summary.tokens_per_round or 1.0:.2f} tokens per round, verify {best.verify_ms:.1f} ms"]
    parts += [] if summary.acceptance is None else [f"{summary.acceptance:.0%} of drafted tokens accepted"]
    parts += [] if summary.hit_rate is None else [f"hit rate {summary.hit_rate:.0%}"]
    parts += [f"{best.step_ms:.2f} ms per token of a chain"] if best.step_ms else []
    return f"  {name:20} {best.rate:7.1f} tok/s   {', '.join(parts)}"


def _recommend(found: ArmCosts) -> str:
    best = found.best_arms()[0]
    if best.rate <= MIN_SPEEDUP * found.arms[PLAIN_ARM].rate:
        return "speculation does not pay; recommended: --mode ar"
    if best.arm.drafter and found.of("sd"):  # a head beside a draft worker
        return "recommended: --mode auto"
    branches = f" --branches {best.arm.branches}" if best.arm.branches else ""
    return f"recommended: --mode {best.arm.mode} --num-draft-tokens {best.arm.depth}{branches}"


def _compare_placements(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> list[str]:
    """Compares `auto` with a process for each model and with both models in one process on the same cores.

    Only where both run on the same CPU: a small target can gain more from a second core than from a drafter on it.
    """
    threads = system.all_threads(pair.settings)
    if not pair.settings.can_colocate or sys.platform == "darwin" or len(system.USABLE_CPUS) < threads:
        return []
    flag = "--colocate" + (f" --threads {threads}" if pair.settings.threads is not None else "")
    placements = {"a process for each model": {}, flag: {"colocate": True, "threads": threads}}
    given = {**flags.settings_of(options), "progress": screen.show, "memory": False}
    sampling = SamplingParams(max_tokens=160, temp=options.temp, ignore_eos=True)
    with ExitStack() as stack:
        clusters = [stack.enter_context(LocalCluster(**{**given, **more})) for more in placements.values()]
        runners = {name: mode_runner(one.client(), "auto") for name, one in zip(placements, clusters, strict=True)}
        texts = list(map(load_codec(pair.target).encode, PROMPTS))
        runs = run_interleaved(runners, texts, sampling, lambda step: screen.show(f"tune: {step}"))
    rates = {name: total_rate([run.timed for run in of_name]) for name, of_name in runs.items()}
    return ["", "auto, by placement (tok/s):", *(f"  {name:<38} {rate:7.1f}" for name, rate in rates.items())]
