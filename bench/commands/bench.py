"""Compares AR, SD, SSD and auto with other engines on the same weights and prompts, in interleaved runs.

Prompts of all classes run at settings that are chosen once, as for a real server; then memory and latency are measured.
`--concurrency` compares concurrent requests instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any

from outrider.bench.commands import files
from outrider.bench.commands.files import parse_modes, parse_numbers
from outrider.bench.commands.footprint import MEMORY_TEXT_TOKENS, footprint_lines, measure_footprint
from outrider.bench.comparison import report
from outrider.bench.comparison.peers import (
    LLAMA_CPP,
    MLX_LM,
    PeerProcess,
    choose_mlx_lm_batch,
    choose_peers,
    llama_cpp,
    mlx_lm,
)
from outrider.bench.comparison.runners import RunnerFamilies
from outrider.bench.comparison.runs import SEED_STRIDE, BatchRunner, mode_batch_runner, run_interleaved
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.client.dialogue import pluralize
from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair
from outrider.orchestrator.settings import ServeSettings, check_setting
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

COMMON = (
    "--prompts", "--classes", "--temps", "--depths", "--max-tokens", "--suite", "--peers", "--out", "--concurrency",
    "--rounds", "--model", "--draft-model", "--branches",
)  # fmt: skip
UNUSED = (*flags.MULTI_REQUEST_SETTINGS, "colocate", "head_in", "ngrams", "memory", "trace")
"""Bench itself runs SD colocated, and with and without n-grams; several clusters can't share a trace."""

DEFAULT_PROMPTS, DEFAULT_DEPTHS = 6, "1,2,3"
DEFAULT_ROUNDS, DEFAULT_MODES = 5, "ar,sd,ssd,auto"
MAX_CONCURRENCY = 256
TRIAL_ROUNDS = 2
# All engines read the same prompts, so no engine may cache them or load estimates of an earlier run.
COMPARISON_SETTINGS = {"prompt_cache": False, "memory": False}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench")
    count = f"prompts per class (default: {DEFAULT_PROMPTS})"
    group.add_argument("--prompts", type=int, metavar="N", help=count)
    files.add_flags(group)
    group.add_argument("--temps", default="0,0.8", metavar="T,T,...", help="temperatures (default: 0,0.8)")
    depths = f"values of K to try for SD, SSD and mlx-lm (default: {DEFAULT_DEPTHS})"
    group.add_argument("--depths", metavar="K,K,...", help=depths)
    length = "tokens to generate in each run (default: 128)"
    group.add_argument("--max-tokens", "-m", "-n", type=int, default=128, metavar="N", help=length)
    peers = "engines to compare with: llama.cpp,mlx-lm, one of the two, or none (default: all that are installed)"
    group.add_argument("--peers", metavar="NAME,NAME", help=peers)
    results = "folder for the results, as JSON and as a picture (default: out)"
    group.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help=results)
    concurrent = parser.add_argument_group("bench of concurrent requests")
    many = "numbers of concurrent requests to measure, like 1,2,4,8,16 (default: compare single requests)"
    concurrent.add_argument("--concurrency", metavar="N,N,...", help=many)
    concurrent.add_argument("--modes", metavar="M,M,...", help=f"modes to run (default: {DEFAULT_MODES})")
    turns = f"measured repetitions of each mode, after one to warm up (default: {DEFAULT_ROUNDS})"
    concurrent.add_argument("--rounds", type=int, metavar="N", help=turns)
    flags.add_request_flags(parser, ("mode", "num_draft_tokens", "drafter"))
    flags.add_cluster_flags(parser, UNUSED)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    pair = choose_pair(ServeSettings(**flags.settings_of(options)))
    if pair.settings.drafts_with_head:
        raise InvalidRequest("bench does not support heads yet; use another draft_backend")
    values.check_int("max_tokens", options.max_tokens, 2, 1 << 20)
    temps = parse_numbers("temps", options.temps, float)
    samplings = [SamplingParams(max_tokens=options.max_tokens, temp=temp) for temp in temps]
    if options.concurrency is not None:
        return _run_concurrent(options, pair, samplings)
    for name in ("modes", "rounds"):
        if getattr(options, name) is not None:
            raise InvalidRequest(f"{name} is only used with concurrency")
    settings, given = pair.settings, flags.settings_of(options)
    if settings.draft_backend == "none":
        raise InvalidRequest("bench compares drafters, and draft_backend is none; choose another one")
    numbers = parse_numbers("depths", options.depths or DEFAULT_DEPTHS, int)
    depths = [check_setting("num_draft_tokens", k) for k in numbers]
    peers = choose_peers(options.peers, options.model, options.draft_model)
    by_class = files.load_prompt_tokens(options, pair)
    count = _check_count(options.prompts, by_class)
    prompts, classes = files.interleave([found[:count] for found in by_class.values()]), [*by_class] * count
    trials = [found[-1] for found in by_class.values()]
    out, screen = ensure_writable(options.out, "choose another --out"), Screen()
    ratios: dict[str, list[report.Ratio]] = {}
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        families = RunnerFamilies(stack, given, settings, depths, peers, screen.show)
        for sampling in samplings:
            best = families.best(trials, sampling, lambda message: screen.show(f"trial, {message}"))
            runs = run_interleaved(best, prompts, sampling, screen.show)
            at = f"T = {sampling.temp:g}"
            raw[at], ratios[at] = runs, report.compare_families(runs, classes, families.threads)
            screen.clear()
            print(report.format_runs(runs, sampling.temp, families.threads, families.weight_bytes))
            print(f"\nratios, {at}\n\n{report.format_ratios(ratios[at])}\n", flush=True)
    used = None
    if (pair.target.context_length or MEMORY_TEXT_TOKENS) >= MEMORY_TEXT_TOKENS:
        used = measure_footprint(given, settings, peers, list(chain(*prompts)), screen.show)
        screen.clear()
    for line in (*(footprint_lines(used) if used else ()), *peers.left_out, *families.notes):
        print(line)
    results = {"ratios": ratios, "footprint": used, "classes": classes, "runs": raw}
    files.write_results(out / "bench.json", settings, results)
    print(f"{options.max_tokens} tokens, B = {settings.breadth}; written: {out / 'bench.json'}")
    files.write_picture(out / "bench.png", lambda: report.draw_runs(raw))
    return 0


def _check_count(given: int | None, by_class: Mapping[str, Sequence[files.Tokens]]) -> int:
    """Returns how many prompts of each class to measure. Raises InvalidRequest if a class has too few."""
    count = DEFAULT_PROMPTS if given is None else given
    for kind, prompts in by_class.items():
        if not 1 <= count < len(prompts):
            raise InvalidRequest(
                f"prompts is {count}; expected 1 to {len(prompts) - 1}: the class {kind} has {len(prompts)}, of which"
                " one is kept for choosing the settings"
            )
    return count


def _run_concurrent(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> int:
    """Compares concurrent requests with AR, SD, SSD, auto and other engines: `--concurrency`."""
    for name in ("depths", "prompts"):
        if getattr(options, name) is not None:
            raise InvalidRequest(f"{name} can't be combined with concurrency")
    widths = [
        values.check_int("concurrency", n, 1, MAX_CONCURRENCY)
        for n in parse_numbers("concurrency", options.concurrency, int)
    ]
    modes = parse_modes(DEFAULT_MODES if options.modes is None else options.modes)
    count = values.check_int("rounds", DEFAULT_ROUNDS if options.rounds is None else options.rounds, 2, 1000)
    settings, peers = pair.settings, choose_peers(options.peers, options.model, options.draft_model)
    prompts = files.interleave(list(files.load_prompt_tokens(options, pair).values()))
    out, screen = ensure_writable(options.out, "choose another --out"), Screen()
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        started = {**COMPARISON_SETTINGS, "max_active": max(widths), **flags.settings_of(options)}
        cluster = stack.enter_context(LocalCluster(progress=screen.show, **started))
        client = cluster.client()
        one_mlx_lm = stack.enter_context(mlx_lm(settings)) if peers.mlx_lm else None
        all_threads, slots = replace(settings, threads=system.all_threads(settings)), dict[int, PeerProcess]()
        for sampling, width in product((replace(s, seed=0, ignore_eos=True) for s in samplings), widths):
            turns = cycle(prompts)
            first, *rounds = [list(islice(turns, width)) for _ in range(count + 1)]
            runners: dict[str, BatchRunner] = {mode: mode_batch_runner(client, mode, width) for mode in modes}
            if peers.gguf is not None:  # a slot for each request, and the threads of our target and drafter together
                if width not in slots:
                    slots[width] = stack.enter_context(llama_cpp(all_threads, peers.gguf, slots=width))
                runners[LLAMA_CPP] = slots[width].run_batch
            if one_mlx_lm is not None:
                screen.show(f"{width} requests: choosing mlx-lm's prefill batch size")
                runners[MLX_LM] = choose_mlx_lm_batch(one_mlx_lm, width, [first] * TRIAL_ROUNDS, sampling)

            def show(message: str, width: int = width) -> None:
                screen.show(f"{width} requests, {message}")

            run_interleaved(runners, [first], sampling, show, seeds=SEED_STRIDE)  # warms up
            found = run_interleaved(runners, rounds, sampling, show, seeds=SEED_STRIDE)
            raw[f"{pluralize(width, 'concurrent request')}, T = {sampling.temp:g}"] = found
            screen.clear()
            print(report.format_concurrent_runs(width, sampling.temp, found) + "\n", flush=True)
    for note in (*peers.left_out, *cluster.notes):
        print(note)
    files.write_results(out / "concurrency.json", settings, {"rounds": raw})
    print(f"{options.max_tokens} tokens each; written: {out / 'concurrency.json'}")
    files.write_picture(out / "concurrency.png", lambda: report.draw_concurrent_runs(raw))
    return 0
