"""Trials of a package on a compute unit, each in a process of its own, and their results, which are kept.

Some graphs crash the Neural Engine's compiler, and with it the process, a few only after a hundred predictions. So
`python -m outrider.drafters.coreml.trial` is a program of its own, which `run_trial` starts: it drafts with the package
and writes its measurements to a file.
"""

from __future__ import annotations

import argparse
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
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median

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
    PackageFunction,
    trial_text,
)
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import DeviceUnavailable, os_build
from outrider.protocol.digest import cache_folder, replace_file
from outrider.protocol.errors import OutriderError

_PROGRAM = ("-P", "-m", "outrider.engine.models_only", "outrider.drafters.coreml.trial")
DEFAULT_PREDICTIONS = 300
_TIMEOUT_SECONDS = 900.0  # a first compile for the Neural Engine can take minutes
_MIN_AGREEMENT = 0.9
_MAX_DISTANCE = 0.05
_TIE_TOLERANCE = 0.05  # of the logits' standard deviation
_WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of a package on a unit, or, with a `failure`, why there are none.

    `agreement`: the share of compared rows whose best token is that of `Package.expected` (see `agreement`);
    `distance`: the mean total variation between the two distributions. `ms`: median milliseconds a call by function;
    `engine_share`: the share of operations that Core ML plans for the Neural Engine, None without a plan.
    `load_seconds` includes the compilation, if the package was not compiled before.
    """

    failure: str
    load_seconds: float = 0.0
    agreement: float = 1.0
    distance: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)
    engine_share: float | None = None

    @property
    def reason(self) -> str:
        """Why the unit must not be used, or "" if it may be."""
        if self.agreement < _MIN_AGREEMENT:
            return f"it agreed with the reference on {self.agreement:.0%} of tokens; expected {_MIN_AGREEMENT:.0%}"
        if self.distance > _MAX_DISTANCE:
            return f"its distributions are {self.distance:.3f} from the reference; expected at most {_MAX_DISTANCE}"
        return self.failure


def kept_trial(package: Package, units: str) -> Trial | None:
    """Returns an earlier trial with this build of macOS and version of coremltools, if there is one."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_trial_file(package, units).read_bytes(), type=Trial)
    return None


def try_once(package: Package, units: str, progress: Callable[[str], None]) -> Trial:
    """Returns the kept trial, or one that is run now."""
    if (kept := kept_trial(package, units)) is not None:
        return kept
    progress(f"trying Core ML on {units} with this draft (once)")
    found = run_trial(package, units)
    replace_file(_trial_file(package, units), msgspec.json.encode(found))
    return found


def _trial_file(package: Package, units: str) -> Path:
    system = f"{os_build()}-{platform.machine()}-coremltools{version('coremltools')}"
    return cache_folder() / "coreml" / "trials" / f"{package.manifest.key}-{units}-{system}.json"


def run_trial(package: Package, units: str, predictions: int = DEFAULT_PREDICTIONS) -> Trial:
    """Tries `package` on `units` in a process of its own: compiles, loads, compares, predicts and measures."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        line = trial_command(package, units, predictions, result)
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return Trial(f"its trial was still running after {_TIMEOUT_SECONDS:.0f} seconds")
        if result.is_file():
            return msgspec.json.decode(result.read_bytes(), type=Trial)
    if done.returncode < 0:
        number = -done.returncode
        return Trial(f"its trial was ended by signal {number} ({signal.strsignal(number)})")
    lines = done.stderr.strip().splitlines()
    reason = f": {lines[-1]}" if lines else f" with exit code {done.returncode}"
    return Trial(f"its trial failed{reason}")


def trial_command(package: Package, units: str, predictions: int, result: Path) -> list[str]:
    """Returns the command line of the program, which writes a `Trial` to the file `result`."""
    line = [sys.executable, *_PROGRAM, "--package", str(package.path), "--units", units]
    return [*line, "--predictions", str(predictions), "--result", str(result)]


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
    load_seconds = time.monotonic() - started
    host = PackageHost(package, runtime)
    actual, expected = _compute_logits(host), package.expected
    actual_probs, expected_probs = (mx.softmax(mx.array(logits), axis=-1) for logits in (actual, expected))
    return Trial(
        failure="",
        load_seconds=round(load_seconds, 3),
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
    return {f.name: round(median_ms(partial(_read_rows, host, f), count), 4) for f, count in counts.items()}


def _read_rows(host: PackageHost, function: PackageFunction) -> None:
    rows = CoreMLKVRows(host)
    rows.read([1] * function.rows, function)
    rows.close()


def median_ms(task: Callable[[], object], rounds: int, warm_up: int = _WARM_UP_CALLS) -> float:
    """Returns the median milliseconds of `rounds` calls of `task`, after `warm_up` calls."""
    taken = timeit.repeat(task, number=1, repeat=warm_up + rounds)
    return 1e3 * median(taken[warm_up:])


def main() -> int:
    parser = argparse.ArgumentParser(prog=_PROGRAM[-1], description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--units", choices=runtimes.COMPUTE_UNITS, required=True)
    parser.add_argument("--predictions", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = measure_package(open_package(options.package), options.units, options.predictions)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    options.result.write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
