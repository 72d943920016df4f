"""What a chunk costs the HTTP process, by itself: before a played orchestrator, while others use cores and caches.

    python -m tools.http_chunk                                    # 30 texts of 20 chunks and of 1: a minute
    python -m tools.http_chunk --against ../before --texts 60     # beside another checkout, text by text
    python -m tools.http_chunk --with PYTHONMALLOC=malloc         # the same code, once in this environment

Two processes multiply matrices that no cache holds, as a target and a drafter do, and every text comes in even steps.
Prints the CPU of a chunk, all that a request costs shared by its chunks, that of a request of one chunk, and with two
sides the one over the other, text by text, with 95 % intervals over texts. Linux only: it reads a process's own clock.
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
from outrider.orchestrator.pairing.model_files import PACKAGE
from outrider.protocol import values
from tools.versions import require_checkout

SIDE = "tools.http_chunk_side"
WARM_UP = 5
WEIGHTS = (4096, 4096)
"""64 MiB: more than a cache has."""

Costs = list[tuple[float, int]]
"""Milliseconds of CPU and chunks, a text each."""


def stream() -> None:
    """Reads all weights again and again, until it is ended."""
    weights, row = np.ones(WEIGHTS, np.float32), np.ones(WEIGHTS[1], np.float32)
    while True:
        weights @ row


@contextmanager
def company(count: int) -> Iterator[None]:
    """So many processes that keep a core and its caches busy."""
    context = get_context("spawn")
    streaming = [context.Process(target=stream, daemon=True) for _ in range(count)]
    for one in streaming:
        one.start()
    try:
        yield
    finally:
        for one in streaming:
            one.kill()
            one.join()


def side(folder: Path, more: Mapping[str, str]) -> HelperProcess:
    """HTTP of that checkout, with `more` in its environment."""
    own = {"PYTHONPATH": str(folder.resolve()), "OPENBLAS_NUM_THREADS": "1"}
    return HelperProcess(SIDE, environment={**os.environ, **own, **more})


def a_chunk(texts: Sequence[tuple[float, int]]) -> float:
    return sum(ms for ms, _ in texts) / sum(chunks for _, chunks in texts)


def told(name: str, sides: Mapping[str, Costs]) -> Iterator[str]:
    for side_name, texts in sides.items():
        yield f"{name}, {side_name}: {bootstrap(texts, a_chunk)} ms of CPU a chunk"
    if len(sides) == 2:
        pairs = list(zip(*sides.values(), strict=True))
        ratio = bootstrap(pairs, lambda drawn: a_chunk([one for one, _ in drawn]) / a_chunk([two for _, two in drawn]))
        yield f"{name}, {' / '.join(sides)}: {ratio}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="the root of another checkout")
    parser.add_argument("--with", action="append", default=[], dest="more", metavar="NAME=VALUE", help="for this side")
    parser.add_argument("--texts", type=int, default=30, help="of each length and side, default 30")
    parser.add_argument("--chunks", type=int, default=20, help="of a text, default 20")
    parser.add_argument("--tokens", type=int, default=5, help="of a chunk, default 5")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between chunks, default 20")
    parser.add_argument("--company", type=int, default=2, help="processes beside it, default 2")


def run(options: argparse.Namespace) -> int:
    texts = values.whole("texts", options.texts, 1, 10_000)
    pace = {"tokens": options.tokens, "gap_ms": options.gap_ms}
    more = dict(one.partition("=")[::2] for one in options.more)
    places = {"this": (PACKAGE.parent, more)}
    if options.against is not None or more:
        other = options.against or PACKAGE.parent
        require_checkout(other)
        places["the other"] = (other, {})
    with ExitStack() as stack:
        helpers = {name: stack.enter_context(side(*place)) for name, place in places.items()}
        stack.enter_context(company(options.company))
        for chunks in (options.chunks, 1):
            found: dict[str, Costs] = {name: [] for name in helpers}
            for number in range(texts + WARM_UP):
                for name in sorted(helpers, reverse=bool(number % 2)):
                    cost = helpers[name].ask({**pace, "chunks": chunks})
                    if number >= WARM_UP:
                        found[name].append((cost["cpu_ms"], cost["chunks"]))
            print(*told(f"{chunks} chunks", found), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
