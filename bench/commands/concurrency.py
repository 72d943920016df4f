"""`outrider bench --concurrency 1,2,4,8,16`: concurrent requests with AR, SD, SSD, auto and other engines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import cycle, islice, product
from typing import Any

from outrider.bench.commands import files
from outrider.bench.commands.files import modes_of, numbers
from outrider.bench.comparison import report
from outrider.bench.comparison.peers import LLAMA_CPP, MLX_LM, PeerProcess, best_mlx_lm, choose, llama_cpp, mlx_lm
from outrider.bench.comparison.report import ConcurrentSection, Rounds
from outrider.bench.comparison.runs import SEEDS, BatchRunner, mode_batch, run_interleaved
from outrider.bench.prompts import CLASSES
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import writable_folder
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

WIDEST = 256
SINGLE_REQUEST_ONLY = ("depths", "prompts", "both_cores")
TRIAL_ROUNDS = 2
# All engines read the same prompts, so no engine may cache them or load estimates of an earlier run.
OWN_SETTINGS = {"prompt_cache": False, "memory": False}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench of concurrent requests")
    many = "numbers of concurrent requests, like 1,2,4,8,16 (default: one request at a time, with all K)"
    group.add_argument("--concurrency", metavar="N,N,...", help=many)
    group.add_argument("--modes", metavar="M,M,...", help="modes to run (default: ar,sd,ssd,auto)")
    group.add_argument("--each", type=int, metavar="N", help="consecutive requests per client (default: 1)")
    turns = "measured repetitions of each mode, after one to warm up (default: 5)"
    group.add_argument("--rounds", type=int, metavar="N", help=turns)


def run(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> int:
    for name in SINGLE_REQUEST_ONLY:
        if getattr(options, name) not in (None, False):
            raise InvalidRequest(f"{name.replace('_', '-')} can't be combined with concurrency")
    widths = [values.whole("concurrency", n, 1, WIDEST) for n in numbers("concurrency", options.concurrency, int)]
    modes = modes_of("ar,sd,ssd,auto" if options.modes is None else options.modes)
    count = values.whole("rounds", 5 if options.rounds is None else options.rounds, 2, 1000)
    each = values.whole("each", 1 if options.each is None else options.each, 1, 100)
    settings, peers = pair.settings, choose(options.peers, options.model, options.draft_model)
    prompts = files.in_turn(list(files.of_classes(options, pair, CLASSES).values()))
    out, screen = writable_folder(options.out, "choose another --out"), Screen()
    sections: list[ConcurrentSection] = []
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        started = {**OWN_SETTINGS, "max_active": max(widths), **flags.settings_of(options)}
        client = stack.enter_context(LocalCluster(progress=screen.show, **started)).client()
        one_mlx_lm = stack.enter_context(mlx_lm(settings)) if peers.mlx_lm else None
        both_cores, slots = replace(settings, threads=2 * settings.threads), dict[int, PeerProcess]()
        for sampling, width in product((replace(s, seed=0) for s in samplings), widths):
            turns = cycle(prompts)
            first, *rounds = [list(islice(turns, width * each)) for _ in range(count + 1)]
            runners: dict[str, BatchRunner] = {mode: mode_batch(client, mode, width) for mode in modes}
            if peers.gguf is not None:  # a slot for each request, and the threads of our target and drafter together
                if width not in slots:
                    slots[width] = stack.enter_context(llama_cpp(both_cores, peers.gguf, slots=width))
                runners[LLAMA_CPP] = slots[width].run_batch
            if one_mlx_lm is not None:
                screen.show(f"{width} requests: choosing mlx-lm's prefill batch size")
                runners[MLX_LM] = best_mlx_lm(one_mlx_lm, width, [first] * TRIAL_ROUNDS, sampling)

            def show(message: str, width: int = width) -> None:
                screen.show(f"{width} requests, {message}")

            run_interleaved(runners, [first], sampling, show, seeds=SEEDS)  # warms up
            found = run_interleaved(runners, rounds, sampling, show, seeds=SEEDS)
            sections.append(report.concurrent_section(width, sampling.temp, found))
            raw[f"{width} at once T={sampling.temp:g}"] = {name: _plain(rounds) for name, rounds in found.items()}
            screen.clear()
            print(report.concurrent_table(sections[-1]) + "\n", flush=True)
    title = f"outrider bench: concurrent requests, {options.max_tokens} tokens each"
    results = {"sections": [asdict(found) for found in sections], "rounds": raw}
    files.write(out, "concurrency", title, settings, results, lambda: report.draw_concurrent(sections, title))
    for note in peers.left_out:
        print(note)
    return 0


def _plain(rounds: Rounds) -> list[list[dict[str, Any]]]:
    """Returns rounds as JSON values; times are in seconds on the clock of `Reply.sent`."""
    return [
        [{"sent": reply.sent, "arrivals": [list(asdict(a).values()) for a in reply.arrivals]} for reply in replies]
        for replies in rounds
    ]
