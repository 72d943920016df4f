"""Measures the CPU time of a chunk in the HTTP process, with a scripted orchestrator, while cores and caches are busy.

    python -m tools.http_chunk                                    # 30 texts of 20 chunks and of 1: a minute
    python -m tools.http_chunk --against ../before --texts 60     # compared with another checkout, text by text
    python -m tools.http_chunk --with PYTHONMALLOC=malloc         # compared with the same code without this variable

Two processes multiply matrices larger than any cache, as a target and a drafter do; each text arrives at an even pace.
Prints the CPU time per chunk (of a whole request, divided by its chunks), that of a request of one chunk, and the ratio
of two sides, with 95 % intervals over texts. Linux only, because it reads another process's CPU clock.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from outrider.bench.comparison.runs import bootstrap
from outrider.bench.helper import HelperProcess
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pairing.model_files import PACKAGE_FOLDER
from outrider.protocol import values
from tools.versions import require_checkout

SIDE_MODULE = "tools.http_chunk_side"
WARM_UP_TEXTS = 5
WEIGHTS_SHAPE = (4096, 4096)
"""64 MiB, larger than any cache."""

Costs = list[tuple[float, int]]
"""CPU milliseconds and chunks of each text."""


def stream_weights() -> None:
    """Reads all weights repeatedly until the process is killed."""
    weights, row = np.ones(WEIGHTS_SHAPE, np.float32), np.ones(WEIGHTS_SHAPE[1], np.float32)
    while True:
        weights @ row


@contextmanager
def run_load(count: int) -> Iterator[None]:
    """Runs `count` processes that keep a core and its caches busy."""
    context = get_context("spawn")
    processes = [context.Process(target=stream_weights, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def start_side(folder: Path, more: Mapping[str, str]) -> HelperProcess:
    """Starts the HTTP process of a checkout, with `more` in its environment."""
    own = {"PYTHONPATH": str(folder.resolve()), "OPENBLAS_NUM_THREADS": "1"}
    return HelperProcess(SIDE_MODULE, environment={**os.environ, **own, **more})


def ms_per_chunk(texts: Sequence[tuple[float, int]]) -> float:
    return sum(ms for ms, _ in texts) / sum(chunks for _, chunks in texts)


def report(name: str, sides: Mapping[str, Costs]) -> Iterator[str]:
    for side_name, texts in sides.items():
        yield f"{name}, {side_name}: {bootstrap(texts, ms_per_chunk)} ms of CPU per chunk"
    if len(sides) == 2:
        pairs = list(zip(*sides.values(), strict=True))
        ratio = bootstrap(
            pairs, lambda drawn: ms_per_chunk([a for a, _ in drawn]) / ms_per_chunk([b for _, b in drawn])
        )
        yield f"{name}, {' / '.join(sides)}: {ratio}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="the root of another checkout")
    variable = "environment variable of this side"
    parser.add_argument("--with", action="append", default=[], dest="more", metavar="NAME=VALUE", help=variable)
    parser.add_argument("--texts", type=int, default=30, help="texts of each length and side (default: 30)")
    parser.add_argument("--chunks", type=int, default=20, help="chunks per text (default: 20)")
    parser.add_argument("--tokens", type=int, default=5, help="tokens per chunk (default: 5)")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="milliseconds between chunks (default: 20)")
    parser.add_argument("--load", type=int, default=2, help="processes that keep cores and caches busy (default: 2)")


def run(options: argparse.Namespace) -> int:
    texts = values.check_int("texts", options.texts, 1, 10_000)
    pace = {"tokens": options.tokens, "gap_ms": options.gap_ms}
    more = dict(variable.partition("=")[::2] for variable in options.more)
    sides = {"this": (PACKAGE_FOLDER.parent, more)}
    if options.against is not None or more:
        other = options.against or PACKAGE_FOLDER.parent
        require_checkout(other)
        sides["the other"] = (other, {})
    with ExitStack() as stack:
        helpers = {name: stack.enter_context(start_side(*settings)) for name, settings in sides.items()}
        stack.enter_context(run_load(options.load))
        for chunks in (options.chunks, 1):
            costs: dict[str, Costs] = {name: [] for name in helpers}
            for number in range(texts + WARM_UP_TEXTS):
                for name in sorted(helpers, reverse=bool(number % 2)):
                    cost = helpers[name].ask({**pace, "chunks": chunks})
                    if number >= WARM_UP_TEXTS:
                        costs[name].append((cost["cpu_ms"], cost["chunks"]))
            print(*report(f"{chunks} chunks", costs), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
