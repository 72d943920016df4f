"""Tries a draft's Core ML package with every mode, weight kind and compute unit, and prints a table.

`launch/mac_check.sh` runs it on a Mac. Each trial runs in a process of its own, which may crash. On other systems the
interpreter replaces the device, to test the survey itself.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafters.coreml import converter, selection, trial
from outrider.drafters.coreml.converter import Options
from outrider.drafters.coreml.interpreter import REFERENCE
from outrider.drafters.coreml.layout import Mode
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.selection import Tried
from outrider.engine.loading import load as load_model
from outrider.protocol.errors import OutriderError

COLUMNS = ("mode", "weights", "units", "good", "agreement", "distance", "compile s", "load s", "q1 ms", "q8 ms",
           "q16 ms", "q32 ms", "prefill64 ms", "engine share q1", "why not")  # fmt: skip
_ON_A_MAC = (("CPU_AND_NE", ("fp16", "int8")), ("CPU_ONLY", ("fp16", "int8")), ("CPU_AND_GPU", ("fp16", "int4")))
_ELSEWHERE = ((REFERENCE, ("fp16", "int8", "int4")),)
_DECODE_STEPS = 60


def cells(row: Tried) -> tuple[str, ...]:
    """Returns the cells of a table row."""
    trial, verdict = row.verdict.trial, row.verdict
    head = (row.variant.mode.value, row.variant.weights, verdict.units, "yes" if verdict.good else "NO")
    if trial is None:
        return (*head, *[""] * (len(COLUMNS) - len(head) - 1), verdict.reason)
    times = [f"{trial.ms[name]:.3f}" for name in ("q1", "q8", "q16", "q32", "prefill64")]
    share = f"{trial.engine_share['q1']:.3f}" if "q1" in trial.engine_share else ""
    seconds = (f"{trial.compile_seconds:.1f}", f"{trial.load_seconds:.1f}")
    numbers = (f"{trial.agreement:.3f}", f"{trial.distance:.4f}", *seconds)
    return (*head, *numbers, *times, share, verdict.reason)


def survey(checkpoint: Path, predictions: int, folder: Path) -> Iterator[Tried]:
    """Converts the draft for each mode and weight kind into `folder`, and tries each package on its compute units."""
    for mode in Mode:
        for units, kinds in _ON_A_MAC if sys.platform == "darwin" else _ELSEWHERE:
            for weights in kinds:
                options = Options(mode, weights, selection.context_of(checkpoint))
                package = converter.package_of(checkpoint, options, folder=folder)
                yield Tried.of(package, selection.try_out(package, units, predictions))


def slowdown(target: str, package: Package, units: str) -> str:
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
        line = [*selection.arguments(package, units, 10**6), "--result", str(Path(directory) / "trial.json")]
        command = trial.command(selection.MODULE, *line)
        silent = subprocess.DEVNULL
        drafting = subprocess.Popen(command, stdout=silent, stderr=silent, env=trial.environment())
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.coreml_survey", description=__doc__)
    parser.add_argument("--model", required=True, help="the draft: a model directory or a Hugging Face id")
    parser.add_argument("--target", help="measure how much its decoding slows down while the draft runs")
    parser.add_argument("--predictions", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="folder for packages (default: the cache)")
    options = parser.parse_args()
    try:
        checkpoint = selection.checkpoint_of(options.model)
        _row(COLUMNS)
        _row(["---"] * len(COLUMNS))
        for tried in survey(checkpoint, options.predictions, options.folder or converter.root()):
            _row(cells(tried))
        if options.target:
            package = converter.package_of(
                checkpoint, Options(context=selection.context_of(checkpoint)), folder=options.folder
            )
            units = "CPU_AND_NE" if sys.platform == "darwin" else REFERENCE
            sys.stdout.write(f"\n{slowdown(options.target, package, units)}\n")
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _row(cells: tuple[str, ...] | list[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
