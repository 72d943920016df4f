"""Tries a draft's Core ML packages with every kind of weights on every compute unit, and prints a table.

`launch/mac_check.sh` runs it on a Mac. Each trial runs in a process of its own, because it may crash. On other systems
the interpreter of `tests.harness` replaces the device, to test the survey itself.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.coreml import trial
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.selection import cached_package
from outrider.drafters.coreml.trial import Trial
from outrider.engine.loading import load as load_model
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pairing.model_files import find_model

COLUMNS = ("weights", "units", "good", "agreement", "distance", "load s", "q1 ms", "q8 ms",
           "q16 ms", "q32 ms", "prefill64 ms", "engine share", "why not")  # fmt: skip
_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU") if sys.platform == "darwin" else ("CPU_ONLY",)
_DECODE_STEPS = 60


def row_cells(weights: str, units: str, row: Trial) -> tuple[str, ...]:
    """Returns the cells of a table row."""
    head = (weights, units, "NO" if row.reason else "yes")
    if row.failure:
        return (*head, *[""] * (len(COLUMNS) - len(head) - 1), row.reason)
    times = [f"{row.ms[name]:.3f}" for name in ("q1", "q8", "q16", "q32", "prefill64")]
    share = "" if row.engine_share is None else f"{row.engine_share:.3f}"
    measured = (f"{row.agreement:.3f}", f"{row.distance:.4f}", f"{row.load_seconds:.1f}")
    return (*head, *measured, *times, share, row.reason)


def run_survey(draft: Path, predictions: int) -> Iterator[tuple[str, ...]]:
    """Converts the draft with each kind of weights, tries each package on its compute units, and yields table rows."""
    for weights, units in product(("fp16", "int8"), _UNITS):
        package = cached_package(draft, lambda stage: None, weights)
        yield row_cells(weights, units, trial.run_trial(package, units, predictions))


def measure_slowdown(target: str, package: Package, units: str) -> str:
    """Returns a sentence that compares the target's decoding alone and while `package` drafts on `units`."""
    loaded = load_model(target)

    def decode() -> float:
        caches, token = make_prompt_cache(loaded.model), mx.zeros((1, 1), mx.int32)
        taken = []
        for _ in range(_DECODE_STEPS):
            started = time.perf_counter()
            token = loaded.model(token, cache=caches)[:, -1:].argmax(-1)
            mx.eval(token)
            taken.append(time.perf_counter() - started)
        return 1e3 * statistics.median(taken)

    decode()
    alone = decode()
    with tempfile.TemporaryDirectory() as directory:
        command = trial.trial_command(package, units, 10**6, Path(directory) / "trial.json")
        silent = subprocess.DEVNULL
        drafting = subprocess.Popen(command, stdout=silent, stderr=silent)
        try:
            time.sleep(20 if sys.platform == "darwin" else 4)  # loading and the comparison come first
            ended = drafting.poll()
            drafted = decode()
        finally:
            drafting.kill()
            drafting.wait()
    note = "" if ended is None else f" (invalid: the drafting process ended with {ended})"
    return (
        f"target decoding: {alone:.2f} ms per token alone, {drafted:.2f} ms while drafting on {units}: "
        f"{100 * (drafted / alone - 1):+.1f} %{note}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="the draft: a model directory or a Hugging Face id")
    parser.add_argument("--target", help="also measure how much the decoding of this target slows down meanwhile")
    predictions = "predictions to time per package (default: 1000)"
    parser.add_argument("--predictions", type=int, default=1000, help=predictions)


def run(options: argparse.Namespace) -> int:
    draft = find_model(options.model).folder
    _print_row(COLUMNS)
    _print_row(["---"] * len(COLUMNS))
    for row in run_survey(draft, options.predictions):
        _print_row(row)
    if options.target:
        units = "CPU_AND_NE" if sys.platform == "darwin" else "CPU_ONLY"
        folder = str(find_model(options.target).folder)
        print(f"\n{measure_slowdown(folder, cached_package(draft, lambda stage: None), units)}")
    return 0


def _print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
