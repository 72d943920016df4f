"""Measures this machine with this pair for about a minute, and recommends AR, SD or SSD, with K and B."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from outrider.bench.commands import tune_heads
from outrider.bench.commands.tune_heads import DEPTHS
from outrider.bench.comparison.runs import ModeRunner, run_interleaved, total_rate
from outrider.bench.timing.forecast import (
    Forecast,
    best_of,
    costs_in_turn,
    doubts,
    forecasts,
    recommendation,
    sd_ceiling,
)
from outrider.bench.timing.probe import Probe, may_pay, probe
from outrider.bench.timing.workbench import workbench
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import writable_folder
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from outrider.orchestrator.machine import spawn, system
from outrider.orchestrator.machine.spawn import MODULES
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 5
NEVER = 2**31 - 1
WORTH_IT = 0.95  # of the target's time
_FIRST = SamplingParams(max_tokens=1, ignore_eos=True)

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Median milliseconds to the first token for prompts of `lengths`, read by the target and by a prefill worker."""

    lengths: tuple[int, ...]
    own_ms: tuple[float, ...]
    worker_ms: tuple[float, ...]

    @property
    def least(self) -> int:
        """The shortest length from which on the worker is always faster; `NEVER` if there is none."""
        least = NEVER
        for length, own, worker in reversed(list(zip(self.lengths, self.own_ms, self.worker_ms, strict=True))):
            if worker >= WORTH_IT * own:
                break
            least = length
        return least

    @property
    def sentence(self) -> str:
        rows = zip(self.lengths, self.own_ms, self.worker_ms, strict=True)
        times = "  ".join(f"{length}: {worker:.0f}, target {own:.0f} ms" for length, own, worker in rows)
        verdict = "never" if self.least == NEVER else f"for prompts of at least {self.least} tokens"
        return f"a prefill worker pays: {verdict} ({times})"


def measure(settings: dict[str, Any], context: int, vocab_size: int, show: Show) -> PrefillTimes:
    """Times random prompts in a cluster without a prefill worker, and in one with a prefill worker.

    Raises:
        OutriderError: a cluster does not start.
    """
    lengths = tuple(length for length in LENGTHS if length < context) or (context - 1,)
    alone = {**settings, "prompt_cache": False, "draft_backend": "none", "draft_model": None, "mode": "ar"}
    times = []
    for workers in (0, 1):
        show(f"tune: prefill by {'a prefill worker' if workers else 'the target'}")
        settings = {**alone, "prefill_workers": workers, "prefill_from": 1}
        with LocalCluster(progress=show, **settings) as cluster:
            times.append(tuple(_median_ms(cluster, length, vocab_size) for length in lengths))
    return PrefillTimes(lengths, *times)


def _median_ms(cluster: LocalCluster, length: int, vocab_size: int) -> float:
    client = cluster.client()
    times = [client.generate(tokens, _FIRST).timings.prompt_ms for tokens in _prompts(length, vocab_size)]
    return statistics.median(times[1:])


def _prompts(length: int, vocab_size: int) -> Sequence[list[int]]:
    """Returns a prompt to warm up, followed by the measured prompts."""
    rng = np.random.default_rng(length)
    return [rng.integers(0, vocab_size, length).tolist() for _ in range(ROUNDS + 1)]


PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef load_settings(path):\n",
    "# Sorts a list of numbers.\ndef quicksort(values):\n",
)
BRANCHES = (4, 8, 16)
TURNAROUND_TOKENS = 64
BUSY = 1
# The assumed turnaround if no hit was measured: one message in each direction.
USUAL_TURNAROUND_MS = 0.3
# Used if the model's configuration lacks them.
USUAL_CONTEXT, USUAL_VOCABULARY = 2048, 256


COMMON = (
    "--temp", "--measure", "--model", "--draft-model", "--draft-backend", "--head", "--threads", "--prefill-workers",
    "--log-level",
)  # fmt: skip
UNUSED = (
    *flags.OF_MANY_REQUESTS, "colocate", "head_in", "ngrams", "trees", "branch_depth", "prompt_cache", "memory",
    "trace",
)  # fmt: skip
"""Tune measures draft workers and heads on single requests without n-grams."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    temp = "temperature to probe at (default: 0)"
    parser.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help=temp)
    runs = "also run each mode, and on a CPU both placements of the draft"
    parser.add_argument("--measure", action="store_true", help=runs)
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    settings = ServeSettings(**flags.settings_of(options))
    pair = choose_pair(settings)
    _check(pair.settings)
    SamplingParams(temp=options.temp)  # before anything starts
    path = tuning.path_for(pair.settings)
    writable_folder(path.parent, "set XDG_CACHE_HOME to a writable folder")
    screen = Screen()
    try:
        record, description, found = (_heads if pair.settings.drafts_by_head else _drafter)(options, pair, screen)
        prefill = _prefill(options, pair, screen) if settings.prefill_workers else None
    except KeyboardInterrupt:
        screen.clear()
        say("outrider tune: interrupted; nothing was saved")
        raise
    screen.clear()
    print(description)
    if prefill is not None:
        print(prefill.sentence)
        record = replace(record, prefill_from=prefill.least)
    if found:
        why = f"this machine was busy: {' and '.join(found)}"
        say(f"outrider tune: nothing was saved, because {why}; run it again on an idle machine")
        return BUSY
    tuning.save(record, path)
    print(f"saved for --mode auto at {'T = 0' if options.temp == 0 else 'any T above 0'}: {path}")
    return 0


def _check(settings: ServeSettings) -> None:
    """Raises InvalidRequest if the drafter can't be measured."""
    if not settings.needs_draft_model:
        raise InvalidRequest(f"tune needs a draft model; draft_backend {settings.draft_backend} has none")


def _texts(pair: ChosenPair) -> list[list[int]]:
    codec = load_codec(pair.target)
    return [list(codec.encode(text)) for text in PROMPTS]


def _heads(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> tuple[Tuning, str, list[str]]:
    """Tunes a pair that drafts only with heads. Interleaved real runs need no plausibility check."""
    return *tune_heads.alone(options, pair, _texts(pair), screen), []


def _drafter(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> tuple[Tuning, str, list[str]]:
    """Tunes a draft worker and additional heads. Returns the record, a description, and doubts about the
    measurement."""
    turnaround_ms = _turnaround(options, screen)
    measured, waited = _probe(pair, options.temp, screen)
    found = forecasts(measured, turnaround_ms)
    lines = [_costs(measured, turnaround_ms)]
    if pair.settings.draft_backend == "mlx":
        lines += filter(None, [spawn.measured(str(pair.settings.draft_model))])
    lines += [_verdict(measured, found), *_other_devices(pair.settings)]
    heads = tune_heads.additional(options, pair, _texts(pair), screen) if pair.settings.head else []
    lines += map(tune_heads.line, heads)
    if options.measure:
        lines.append(_compare(options, pair, found, screen))
        lines += _in_one_process(options, pair, screen)
    record = tune_heads.with_heads(_record(measured, turnaround_ms, found, options.temp), heads)
    return record, "\n".join(lines), doubts(measured, waited)


def _other_devices(settings: ServeSettings) -> list[str]:
    """Suggests other devices for the drafter on a Mac."""
    if sys.platform != "darwin" or settings.draft_backend != "mlx" or settings.draft_device != "auto":
        return []
    return [
        "target and drafter share the GPU of this Mac. The drafter can use the CPU (--draft-device cpu) or the Neural"
        " Engine (--draft-backend coreml) instead; `outrider doctor` shows the time per token there, and `outrider"
        " tune` with one of these flags the speed"
    ]


def _probe(pair: ChosenPair, temp: float, screen: Screen) -> tuple[Probe, float]:
    """Returns the probe, and the share of time that the target waited for a CPU: 0 if the cores can't suffice."""
    sampling = SamplingParams(max_tokens=1 << 20, temp=temp, seed=7, ignore_eos=True)
    with workbench(pair.settings, screen.show) as bench:
        ran, waited = _scheduled()
        measured = probe(bench, _texts(pair), sampling, DEPTHS, BRANCHES, screen.show)
        ran, waited = (now - before for now, before in zip(_scheduled(), (ran, waited), strict=True))
    wanted = pair.settings.threads * (pair.settings.shards + pair.settings.drafters)
    return measured, waited / max(ran + waited, 1) if len(system.GIVEN) >= wanted else 0.0


def _scheduled() -> tuple[int, int]:
    """Returns the nanoseconds that the target's threads ran and waited for a CPU; 0 on systems that do not count
    them."""
    children = psutil.Process().children(recursive=True)
    pids = [child.pid for child in children if MODULES["target"] in child.cmdline()]
    tasks = [path.read_text().split() for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(ran) for ran, _, _ in tasks), sum(int(waited) for _, waited, _ in tasks)


def _turnaround(options: argparse.Namespace, screen: Screen) -> float:
    """Returns the mean turnaround of real hits."""
    with LocalCluster(progress=screen.show, **flags.settings_of(options)) as cluster:
        screen.show("tune: turnaround")
        sampling = SamplingParams(max_tokens=TURNAROUND_TOKENS, ignore_eos=True)
        timings = cluster.client().generate(PROMPTS[0], sampling, mode="ssd").timings
    return statistics.fmean(timings.turnaround_ms) if timings.turnaround_ms else USUAL_TURNAROUND_MS


def _prefill(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> PrefillTimes:
    context, vocabulary = pair.target.context_length, pair.target.vocab_size
    return measure(flags.settings_of(options), context or USUAL_CONTEXT, vocabulary or USUAL_VOCABULARY, screen.show)


def _costs(p: Probe, turnaround_ms: float) -> str:
    rows = "  ".join(f"{rows}: {ms / p.verify_ms(1):.2f}" for rows, ms in p.verify_ms.points)
    in_turn = [(depth, costs_in_turn(p).chain_ms(depth)) for depth, _ in p.turn_ms.points]
    return "\n".join(
        [
            f"one token of plain decoding  {p.step_ms:.2f} ms",
            f"verify of M tokens, alone    {p.verify_ms(1):.2f} ms times  {rows}",
            f"chain right after a chain    {_points(p.chain_ms.points)} ms by length; link {p.link_ms:.2f} ms",
            f"chain after a verify         {_points(in_turn)} ms by length, including the link",
            f"next token of all branches   {_points(p.tree_ms.points)} ms by number of branches",
            f"turnaround of a hit          {turnaround_ms:.2f} ms",
        ]
    )


def _points(points: Sequence[tuple[int, float]]) -> str:
    return "  ".join(f"{at}: {ms:.2f}" for at, ms in points)


def _verdict(measured: Probe, found: list[Forecast]) -> str:
    chosen = recommendation(found)
    lines = ["", "forecast (ar, sd: times in isolation, in turn; ssd: verify time while the drafter works):"]
    for best in _bests(found):
        lines.append(f"  {best.mode:4} {_settings(best):14} {best.tokens_per_second:7.1f} tok/s   {best.limit}")
    if chosen.mode == "ar":
        lines.append(f"speculation does not pay: {_why_not(measured, found)}. Recommended: --mode ar")
    else:
        depth = chosen.depth
        lines.append(f"upper bound of SSD over SD at K = {depth}: {sd_ceiling(measured, depth):.2f}x")
        lines.append(f"recommended: --mode {chosen.mode} {_flags(chosen)}")
    return "\n".join(lines)


def _why_not(measured: Probe, found: list[Forecast]) -> str:
    tried = measured.rehearsals[0]
    if len(measured.rehearsals) == 1 and not may_pay(tried, measured.step_ms, measured.verify_ms):
        tokens = f"{tried.tokens_in_full:.2f} tokens per round at K = {tried.depth}"
        return f"{tokens} would not pay for the verify even with free drafting, so no other K and B were tried"
    best = next(forecast for forecast in found if forecast.mode != "ar")
    return f"{best.mode} would reach {best.tokens_per_second:.1f} tok/s, {best.limit}"


def _settings(forecast: Forecast) -> str:
    return {"ar": "", "sd": f"K={forecast.depth}"}.get(forecast.mode, f"K={forecast.depth} B={forecast.branches}")


def _flags(forecast: Forecast) -> str:
    branches = f" --branches {forecast.branches}" if forecast.branches else ""
    return f"--num-draft-tokens {forecast.depth}{branches}"


def _compare(options: argparse.Namespace, pair: ChosenPair, found: list[Forecast], screen: Screen) -> str:
    """Runs each mode at its forecast settings, interleaved, without n-grams, which the forecast does not include."""
    lines = ["", "forecast, measured (tok/s), and their ratio:"]
    sampling = SamplingParams(max_tokens=160, temp=options.temp, ignore_eos=True)
    with LocalCluster(progress=screen.show, **{**flags.settings_of(options), "ngrams": False}) as cluster:
        runners = [
            ModeRunner(best.mode, cluster.client(), best.mode, best.depth or None, best.branches or None)
            for best in _bests(found)
        ]
        runs = run_interleaved(runners, _texts(pair), sampling, lambda step: screen.show(f"tune: {step}"))
    screen.clear()
    for best in _bests(found):
        rate = total_rate([run.timed for run in runs[best.mode]])
        ratio = best.tokens_per_second / rate
        lines.append(f"  {best.mode:4} {best.tokens_per_second:7.1f} {rate:7.1f}   {ratio:.2f}")
    return "\n".join(lines)


def _in_one_process(options: argparse.Namespace, pair: ChosenPair, screen: Screen) -> list[str]:
    """Compares `auto` with a core for each model and with both models in one process on all these cores.

    Only where both run on the same CPU: a small target can gain more from a second core than from a drafter on it.
    """
    threads = 2 * pair.settings.threads
    if not pair.settings.can_colocate or sys.platform == "darwin" or len(system.GIVEN) < threads:
        return []
    given = {**flags.settings_of(options), "memory": False}
    sampling = SamplingParams(max_tokens=160, temp=options.temp, ignore_eos=True)
    with (
        LocalCluster(progress=screen.show, **given) as apart,
        LocalCluster(progress=screen.show, **{**given, "colocate": True, "threads": threads}) as together,
    ):
        runners = [ModeRunner(name, one.client(), "auto") for name, one in (("apart", apart), ("together", together))]
        runs = run_interleaved(runners, _texts(pair), sampling, lambda step: screen.show(f"tune: {step}"))
    screen.clear()
    rates = {name: total_rate([run.timed for run in of_name]) for name, of_name in runs.items()}
    lines = ["", "auto, by placement (tok/s):", f"  a process for each model               {rates['apart']:7.1f}"]
    lines.append(f"  --colocate --threads {threads:<3}               {rates['together']:7.1f}")
    return lines


def _bests(found: list[Forecast]) -> list[Forecast]:
    """Returns the best forecast of each mode."""
    return [best for mode in ("ar", "sd", "ssd") if (best := best_of(found, mode)) is not None]


def _record(p: Probe, turnaround_ms: float, found: list[Forecast], temp: float) -> Tuning:
    chosen = best_of(found, "ssd") or found[0]
    rehearsal = next(t for t in p.rehearsals if (t.depth, t.branches) == (chosen.depth, chosen.branches))
    fastest = sorted(_bests(found), key=lambda best: -best.tokens_per_second)
    return Tuning(
        step_ms=p.step_ms,
        verify_ms=p.verify_ms.points,
        depth_ms=p.tree_ms(chosen.branches),
        draft_ms=p.chain_ms(chosen.depth) / chosen.depth,
        link_ms=p.link_ms,
        turnaround_ms=turnaround_ms,
        acceptance=tuple(rehearsal.acceptance(position) for position in range(rehearsal.depth)),
        hit_rate=rehearsal.hit_rate,
        choices=tuple(TunedArm(f.mode, f.depth, f.branches, f.tokens_per_second) for f in fastest),
        temp=temp,
    )
