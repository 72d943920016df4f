"""Trials of a package on a compute unit, each in a process of its own, and their results, which are kept.

Some graphs crash the Neural Engine's compiler, and with it the process, a few only after a hundred predictions. So
`python -m outrider.drafters.coreml.trial` is a program of its own, which `run_trial` starts: it drafts with the package
and writes its measurements to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import signal
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml import runtimes
from outrider.drafters.coreml.drafter import CoreMLKVRows, PackageHost
from outrider.drafters.coreml.layout import (
    TRIAL_PROMPT_TOKENS,
    TRIAL_ROWS,
    TRIAL_STEPS,
    Options,
    PackageFunction,
    trial_text,
)
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import DeviceUnavailable, RuntimeFault, os_build
from outrider.protocol.digest import cache_folder, replace_file
from outrider.protocol.errors import InvalidRequest, OutriderError

_PROGRAM = ("-P", "-m", "outrider.engine.models_only", "outrider.drafters.coreml.trial")
DEFAULT_PREDICTIONS = 300
_TIMEOUT_SECONDS = 900.0  # a first compile for the Neural Engine can take minutes
_UNAVAILABLE_EXIT_CODE = 20  # the exit code if the device does not exist on this machine
_MIN_AGREEMENT = 0.9
_MAX_DISTANCE = 0.05
_TIE_TOLERANCE = 0.05  # of the logits' standard deviation
_WARM_UP_CALLS = 3
_ROUND_FUNCTIONS = ("q1", "q8", "q16")


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of a package on a unit.

    `agreement`: the share of compared rows whose best token is that of `Package.expected` (see `agreement`);
    `distance`: the mean total variation between the two distributions. `ms`: median milliseconds a call by function;
    `engine_share`: the share of operations that Core ML plans for the Neural Engine, {} without a plan.
    `compile_seconds` is 0 if the package was compiled before.
    """

    compile_seconds: float
    load_seconds: float
    predictions: int
    agreement: float
    distance: float
    ms: dict[str, float] = field(default_factory=dict)
    engine_share: dict[str, float] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """Why the unit must not be used, or "" if it may be."""
        if not self.agreement >= _MIN_AGREEMENT:  # also for NaN
            return f"it agreed with the reference on {self.agreement:.0%} of tokens; expected {_MIN_AGREEMENT:.0%}"
        if not self.distance <= _MAX_DISTANCE:
            return f"its distributions are {self.distance:.3f} from the reference; expected at most {_MAX_DISTANCE}"
        return ""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The results of the package with the hash `key` on one unit.

    `trial`: None if it did not finish. `reason`: why the unit must not be used, or "". `final`: the device does not
    exist or does not respond, so trials of other packages are pointless.
    """

    options: Options
    key: str
    units: str
    trial: Trial | None = None
    reason: str = ""
    final: bool = False

    @property
    def cost(self) -> float:
        """The mean milliseconds of the functions that a round of drafting calls; infinite if it must not be used."""
        if self.trial is None or self.reason:
            return math.inf
        return mean(self.trial.ms[name] for name in _ROUND_FUNCTIONS)


class TrialStore:
    """The kept results of the packages of the draft whose weights have the hash `source_hash`. Each is valid for one
    package (by its hash), one build of macOS and one version of coremltools."""

    def __init__(self, source_hash: str) -> None:
        system = f"{os_build()}-{platform.machine()}-coremltools{version('coremltools')}"
        self._file = cache_folder() / "coreml" / "probes" / f"{source_hash}-{system}.json"
        self.rows: list[TrialResult] = []
        with suppress(OSError, ValueError, msgspec.ValidationError, InvalidRequest):  # then trials run again
            self.rows = msgspec.convert(json.loads(self._file.read_text(encoding="utf-8")), list[TrialResult])

    def find(self, package: Package, units: str) -> TrialResult | None:
        return next((row for row in self.rows if (row.key, row.units) == (package.manifest.key, units)), None)

    def add(self, row: TrialResult) -> None:
        """Keeps `row`, in the place of an earlier one of the same package and unit."""
        self.rows = [row if (old.key, old.units) == (row.key, row.units) else old for old in self.rows]
        self.rows += [] if row in self.rows else [row]
        replace_file(self._file, json.dumps(msgspec.to_builtins(self.rows), indent=1))


def run_trial(package: Package, units: str, predictions: int = DEFAULT_PREDICTIONS) -> TrialResult:
    """Tries `package` on `units` in a process of its own: compiles, loads, compares, predicts and measures."""
    row = TrialResult(package.options, package.manifest.key, units)
    try:
        found = Trial(**_run_program(package, units, "--predictions", str(predictions)))
    except (DeviceUnavailable, RuntimeFault) as error:
        return dataclasses.replace(row, reason=str(error), final=isinstance(error, DeviceUnavailable))
    return dataclasses.replace(row, trial=found, reason=found.fault)


def trial_command(package: Package, units: str, *arguments: str) -> list[str]:
    """Returns the command line of the program, without the file for its result."""
    return [sys.executable, *_PROGRAM, "--package", str(package.path), "--units", units, *arguments]


def _run_program(package: Package, units: str, *arguments: str) -> Any:
    """Returns the JSON object that the program writes.

    Raises:
        DeviceUnavailable: the unit is absent, or hangs.
        RuntimeFault: the program failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        line = trial_command(package, units, *arguments, "--result", str(result))
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeviceUnavailable(f"its trial was still running after {_TIMEOUT_SECONDS:.0f} seconds") from None
        if result.is_file():
            return json.loads(result.read_text(encoding="utf-8"))
    if done.returncode < 0:
        names = {known.value: known.name for known in signal.Signals}
        number = -done.returncode
        raise RuntimeFault(f"its trial was ended by {names.get(number, f'signal {number}')}")
    lines = done.stderr.strip().splitlines()
    reason = f": {lines[-1]}" if lines else f" with exit code {done.returncode}"
    failure = DeviceUnavailable if done.returncode == _UNAVAILABLE_EXIT_CODE else RuntimeFault
    raise failure(f"its trial failed{reason}")


def measure_package(package: Package, units: str, predictions: int) -> Trial:
    """Compiles, loads, compares with MLX's logits, predicts `predictions` times, and measures.

    Raises:
        DeviceUnavailable: this machine has no such unit.
        OutriderError: the device refused the package or returned no finite numbers.
    """
    if units == "CPU_AND_NE" and not runtimes.has_neural_engine():  # without a Neural Engine, the unit would be the CPU
        raise DeviceUnavailable("Core ML can't use a Neural Engine on this machine")
    started = time.monotonic()
    runtime = runtimes.open_runtime(package, units)
    loaded = time.monotonic()
    host = PackageHost(package, runtime)
    actual, expected = _compute_logits(host), package.expected
    actual_probs, expected_probs = (mx.softmax(mx.array(logits), axis=-1) for logits in (actual, expected))
    return Trial(
        compile_seconds=round(runtime.compile_seconds, 3),
        load_seconds=round(loaded - started - runtime.compile_seconds, 3),
        predictions=predictions,
        agreement=agreement(actual, expected),
        distance=float(mx.abs(actual_probs - expected_probs).sum(axis=-1).mean() / 2),
        ms=_time_functions(host, predictions),
        engine_share=runtimes.engine_share(package, units),
    )


def agreement(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Returns the share of rows [R, vocab] with the same best token; if the two best are nearly tied, either counts."""
    top = np.argsort(-expected, axis=-1)[:, :2]
    first, second = np.take_along_axis(expected, top, axis=-1).T
    tied = (first - second <= _TIE_TOLERANCE * expected.std(axis=-1)) & (actual.argmax(axis=-1) == top[:, 1])
    return float(((actual.argmax(axis=-1) == top[:, 0]) | tied).mean())


def _compute_logits(host: PackageHost) -> NDArray[np.float32]:
    """Returns the logits of `trial_text` after its prompt, in the order of `Package.expected`."""
    layout, text = host.layout, iter(trial_text(host.layout.architecture.vocab_size))
    rows, (single, several) = CoreMLKVRows(host), layout.functions[:2]
    calls = [(layout.prefill, TRIAL_PROMPT_TOKENS), (several, TRIAL_ROWS), *[(single, 1)] * TRIAL_STEPS]
    logits = [rows.read(list(islice(text, count)), function).logits for function, count in calls]
    rows.close()
    return np.concatenate(logits[1:])


def _time_functions(host: PackageHost, predictions: int) -> dict[str, float]:
    """Returns the median milliseconds of a call, over `predictions` calls of one row, a tenth of that of more rows."""
    counts = {f: predictions if f.rows == 1 else predictions // 10 + 1 for f in host.layout.functions}
    return {function.name: round(_time_function(host, function, count), 4) for function, count in counts.items()}


def _time_function(host: PackageHost, function: PackageFunction, count: int) -> float:
    rows = CoreMLKVRows(host)

    def read() -> None:
        nonlocal rows
        if rows.length + function.rows > host.layout.context:
            rows.close()
            rows = CoreMLKVRows(host)
        rows.read([1] * function.rows, function)

    taken = median_ms(read, count)
    rows.close()
    return taken


def median_ms(task: Callable[[], object], rounds: int, warm_up: int = _WARM_UP_CALLS) -> float:
    """Returns the median milliseconds of `rounds` calls of `task`, after `warm_up` calls."""
    taken = timeit.repeat(task, number=1, repeat=warm_up + rounds)
    return 1e3 * median(taken[warm_up:])


def main() -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM[-1], description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--units", choices=runtimes.COMPUTE_UNITS, required=True)
    parser.add_argument("--predictions", type=int, default=DEFAULT_PREDICTIONS)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = measure_package(open_package(options.package), options.units, options.predictions)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return _UNAVAILABLE_EXIT_CODE if isinstance(error, DeviceUnavailable) else error.exit_code
    options.result.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
