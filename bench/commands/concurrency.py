"""`outrider bench --concurrency 1,2,4,8,16`: concurrent requests with AR, SD, SSD, auto and other engines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, product
from typing import Any

from outrider.bench.commands import files
from outrider.bench.commands.files import modes_of, numbers
from outrider.bench.comparison import report
from outrider.bench.comparison.peers import LLAMA_CPP, ChosenPeers, PeerProcess, choose, llama_cpp, mlx_lm
from outrider.bench.comparison.report import ConcurrentSection, Rounds
from outrider.bench.comparison.requests import SEEDS, BatchRunner, ModeBatch, PeerBatch, Texts, best_mlx_lm
from outrider.bench.comparison.runs import run_interleaved
from outrider.bench.prompts import CLASSES
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.flags import writable_folder
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

WIDEST = 256
SINGLE_REQUEST_ONLY = ("depths", "prompts", "both_cores", "contended")
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


@dataclass(frozen=True, slots=True)
class ConcurrentPlan:
    """The checked plan of a bench of concurrent requests."""

    widths: list[int]
    modes: list[str]
    rounds: int
    each: int
    samplings: list[SamplingParams]
    prompts: list[tuple[int, ...]]
    peers: ChosenPeers

    def rounds_of(self, width: int) -> list[Texts]:
        """Returns the prompts of each round; the first round warms up."""
        turns = cycle(self.prompts)
        return [list(islice(turns, width * self.each)) for _ in range(self.rounds + 1)]


def run(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> int:
    plan = _plan(options, pair, samplings)
    out, screen = writable_folder(options.out, "choose another --out"), Screen()
    given = flags.settings_of(options)
    sections: list[ConcurrentSection] = []
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        started = {**OWN_SETTINGS, "max_active": max(plan.widths), **given}
        cluster = stack.enter_context(LocalCluster(progress=screen.show, **started))
        client, peers = cluster.client(), _Peers(stack, pair.settings, plan.peers)
        for sampling, width in product(plan.samplings, plan.widths):
            first, *rounds = plan.rounds_of(width)
            runners: list[BatchRunner] = [ModeBatch(mode, client, width) for mode in plan.modes]
            runners += peers.runners(width, [first] * TRIAL_ROUNDS, sampling, screen)

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
    files.write(
        out, "concurrency", title, pair.settings, results, lambda path: report.draw_concurrent(sections, path, title)
    )
    for note in plan.peers.left_out:
        print(note)
    return 0


class _Peers:
    """Other engines that answer batches. They are started on first use and ended by `stack`."""

    def __init__(self, stack: ExitStack, settings: ServeSettings, chosen: ChosenPeers) -> None:
        self._stack = stack
        self._both_cores = replace(settings, threads=2 * settings.threads)
        self._gguf = chosen.gguf
        self._mlx_lm = stack.enter_context(mlx_lm(settings)) if chosen.mlx_lm else None
        self._slots: dict[int, PeerProcess] = {}

    def runners(
        self, width: int, trial: Sequence[Texts], sampling: SamplingParams, screen: Screen
    ) -> list[BatchRunner]:
        """Returns mlx-lm, and llama.cpp with one slot per request and as many threads as our target and drafter
        together."""
        runners: list[BatchRunner] = []
        if self._gguf is not None:
            if width not in self._slots:
                started = llama_cpp(self._both_cores, self._gguf, slots=width)
                self._slots[width] = self._stack.enter_context(started)
            runners.append(PeerBatch(LLAMA_CPP, self._slots[width]))
        if self._mlx_lm is not None:
            screen.show(f"{width} requests: choosing mlx-lm's prefill batch size")
            runners.append(best_mlx_lm(self._mlx_lm, width, trial, sampling))
        return runners


def _plan(options: argparse.Namespace, pair: ChosenPair, samplings: Sequence[SamplingParams]) -> ConcurrentPlan:
    """Returns the plan that the flags describe.

    Raises:
        InvalidRequest: a flag is invalid, or measures one request at a time.
    """
    for name in SINGLE_REQUEST_ONLY:
        if getattr(options, name) not in (None, False):
            raise InvalidRequest(f"{name.replace('_', '-')} can't be combined with concurrency")
    widths = [values.whole("concurrency", n, 1, WIDEST) for n in numbers("concurrency", options.concurrency, int)]
    modes = modes_of("ar,sd,ssd,auto" if options.modes is None else options.modes)
    rounds = values.whole("rounds", 5 if options.rounds is None else options.rounds, 2, 1000)
    each = values.whole("each", 1 if options.each is None else options.each, 1, 100)
    peers = choose(options.peers, pair.settings, options.model, options.draft_model)
    kinds = files.of_classes(options, pair, CLASSES)
    mixed = files.in_turn(list(kinds.values()))
    return ConcurrentPlan(widths, modes, rounds, each, [replace(s, seed=0) for s in samplings], mixed, peers)


def _plain(rounds: Rounds) -> list[list[dict[str, Any]]]:
    """Returns rounds as JSON values; times are in seconds on the clock of `Reply.sent`."""
    return [
        [{"sent": reply.sent, "arrivals": [list(asdict(a).values()) for a in reply.arrivals]} for reply in replies]
        for replies in rounds
    ]
