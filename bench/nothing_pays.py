"""Where speculation can't pay, `auto` must not cost: AR against auto, in turns, on the embedded target.

    python -m outrider.bench.nothing_pays          # 8 prompts x 128 tokens after 4 to warm up, T = 0 and 0.8: minutes
    python -m outrider.bench.nothing_pays --prompts 24

A draft of shuffled weights agrees with nothing; with the reference BLAS that MLX's wheel carries on Linux a verify of M
tokens costs M times one. Without n-grams, which may pay all the same. The exit code is 1 when a lower bound lies under
--least.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.bench.contest.contest import Ours, compete
from outrider.bench.contest.statistics import Interval, ratio
from outrider.bench.embedded import mixed_tokens
from outrider.bench.scrambled import scrambled
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.blas import CHOICE
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

Tell = Callable[[str], None]
WARM_UP = 4
TEMPS = (0.0, 0.8)


@contextmanager
def random_draft() -> Iterator[dict[str, Any]]:
    """The settings of a cluster whose draft agrees with nothing."""
    with tempfile.TemporaryDirectory() as folder:
        draft = scrambled(EMBEDDED_DRAFT, Path(folder))
        yield {"model": str(EMBEDDED_TARGET), "draft_model": str(draft)}


@contextmanager
def reference_blas() -> Iterator[dict[str, Any]]:
    """The settings of a cluster that runs on what MLX's wheel carries."""
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = ""
    try:
        yield {}
    finally:
        os.environ.pop(CHOICE) if before is None else os.environ.update({CHOICE: before})


CASES = {"random draft": random_draft, "reference BLAS": reference_blas}


def measure(settings: dict[str, Any], count: int, temp: float, tell: Tell) -> tuple[Interval, str]:
    """auto / ar after a warm-up, and why auto does what it does."""
    prompts = mixed_tokens(WARM_UP + count)
    sampling = SamplingParams(max_tokens=128, temp=temp, ignore_eos=True)
    with LocalCluster(progress=tell, ngrams=False, memory=False, **settings) as cluster:
        client = cluster.client()
        ways = [Ours("ar", client, "ar"), Ours("auto", client, "auto")]
        compete(ways, prompts[:WARM_UP], sampling, tell)
        runs = compete(ways, prompts[WARM_UP:], sampling, tell)
        why = client.generate(prompts[0], SamplingParams(max_tokens=2, temp=temp, seed=0), mode="auto").notes
    times = {name: [run.timed for run in found] for name, found in runs.items()}
    return ratio(times["auto"], times["ar"]), "; ".join(why)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts, all classes in turn")
    parser.add_argument("--least", type=float, default=0.97, help="what the lower bounds must reach")


def run(options: argparse.Namespace) -> int:
    if options.prompts < 2:
        raise InvalidRequest(f"prompts is {options.prompts}; expected 2 or more for an interval")
    screen, missed = Screen(), False
    for name, case in CASES.items():
        for temp in TEMPS:
            with case() as settings:
                found, why = measure(settings, options.prompts, temp, screen.show)
            screen.clear()
            print(f"{name}, T = {temp:g}: auto / ar {found}   {why}", flush=True)
            missed |= found.low < options.least
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
