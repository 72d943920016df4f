"""`python -m outrider.drafters.coreml.trial`: tries one package on one compute unit, and writes the result to a file.

Some graphs crash the Neural Engine's compiler, and with it the process, a few only after a hundred predictions. So this
program runs in a process of its own, started by `run_program`; if it writes no file, its `Ending` has the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml import runtimes
from outrider.drafters.coreml.host import LinearCache, PackageHost
from outrider.drafters.coreml.interpreter import NAMES, REFERENCE, NumpyRuntime, runtime_of
from outrider.drafters.coreml.layout import PackageFunction
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import DeviceAbsent, compiled_path
from outrider.protocol.errors import ModelError, OutriderError

ABSENT = 20
"""The exit code of a program whose device does not exist on this machine."""
_ROOT = Path(__file__).absolute().parents[3]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a program: its `written` result, or None with the `reason`.

    `final`: the device does not exist or does not respond, so that further trials are of no use.
    """

    written: str | None
    reason: str = ""
    final: bool = False


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line of one of this project's modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns this process's environment, with the project on the module path."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def run_program(module: str, arguments: list[str], seconds: float) -> Ending:
    """Runs `module` with `arguments` and --result FILE, for at most `seconds`."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        line = command(module, *arguments, "--result", str(result))
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=seconds, env=environment())
        except subprocess.TimeoutExpired:
            return Ending(None, f"its trial was still running after {seconds:.0f} seconds", final=True)
        if not result.is_file():
            return Ending(None, _reason(done), final=done.returncode == ABSENT)
        return Ending(result.read_text(encoding="utf-8"))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its trial was ended by {_signal(-done.returncode)}"
    lines = done.stderr.strip().splitlines()
    return f"its trial failed: {lines[-1]}" if lines else f"its trial failed with exit code {done.returncode}"


def _signal(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


_STEPS = 12
_WARM_UP = 3
_TIE = 0.05  # of the logits' standard deviation


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial of a package on a unit.

    `agreement`: the share of compared rows whose best token is the interpreter's (see `agreement`); `distance`: the
    mean total variation between the two distributions. `ms`: median milliseconds a call by function; `engine_share`:
    the share of operations that Core ML plans for the Neural Engine, {} without a plan. `compile_seconds` is 0 if the
    package was compiled before.
    """

    units: str
    compile_seconds: float
    load_seconds: float
    predictions: int
    agreement: float
    distance: float
    ms: dict[str, float] = field(default_factory=dict)
    engine_share: dict[str, float] = field(default_factory=dict)


def run(package: Package, units: str, predictions: int) -> Trial:
    """Compiles, loads, compares with the interpreter, predicts `predictions` times, and measures.

    Raises:
        DeviceAbsent: this machine has no such unit.
        OutriderError: the device refused the package or returned no finite numbers.
    """
    started = time.monotonic()
    if units != REFERENCE:
        compiled_path(package)
    _check_engine(units)
    compiled = time.monotonic()
    host = PackageHost(package, runtime_of(package, units))
    loaded = time.monotonic()
    actual, expected = _logits(host), _logits(PackageHost(package, NumpyRuntime(package.mlpackage)))
    return Trial(
        units=units,
        compile_seconds=round(compiled - started, 3),
        load_seconds=round(loaded - compiled, 3),
        predictions=predictions,
        agreement=agreement(actual, expected),
        distance=float(np.abs(_softmax(actual) - _softmax(expected)).sum(axis=-1).mean() / 2),
        ms=_times(host, predictions),
        engine_share=_engine_share(package, units),
    )


def _check_engine(units: str) -> None:
    """Raises DeviceAbsent if the unit needs a Neural Engine and Core ML reports none; it would be the CPU again."""
    if units != "CPU_AND_NE":
        return
    try:
        has_engine = runtimes.has_engine()
    except ModelError:  # not known
        return
    if not has_engine:
        raise DeviceAbsent("Core ML can't use a Neural Engine on this machine")


def _engine_share(package: Package, units: str) -> dict[str, float]:
    if units == REFERENCE:
        return {}
    try:
        return runtimes.engine_share(package, units)
    except ModelError:  # the plan is only informative
        return {}


def agreement(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Returns the share of rows [R, vocab] with the same best token; if the two best are nearly tied, either counts."""
    top = np.argsort(-expected, axis=-1)[:, :2]
    first, second = np.take_along_axis(expected, top, axis=-1).T
    tied = (first - second <= _TIE * expected.std(axis=-1)) & (actual.argmax(axis=-1) == top[:, 1])
    return float(((actual.argmax(axis=-1) == top[:, 0]) | tied).mean())


def _logits(host: PackageHost) -> NDArray[np.float32]:
    """Returns the logits of a fixed random text, read by the prefill, then eight tokens at once, then one by one."""
    layout = host.layout
    text = np.random.default_rng(0).integers(0, layout.architecture.vocab_size, layout.context).tolist()
    line, rows = LinearCache(host), []
    several, single = layout.functions[1], layout.functions[0]
    line.feed(text[:16], layout.prefill)
    for function, count in ((several, several.rows), *((single, 1) for _ in range(_STEPS))):
        fresh = line.feed(text[line.length : line.length + count], function)
        if fresh.logits is not None:
            rows.append(fresh.logits)
    line.close()
    return np.concatenate(rows)


def _times(host: PackageHost, predictions: int) -> dict[str, float]:
    """Returns milliseconds a call: of the single-row function over `predictions` calls, of the others over a tenth."""
    single = host.layout.functions[0]
    return {
        function.name: round(_time(host, function, predictions if function is single else predictions // 10 + 1), 4)
        for function in host.layout.functions
    }


def _time(host: PackageHost, function: PackageFunction, count: int) -> float:
    line = LinearCache(host)

    def feed() -> None:
        nonlocal line
        if line.length + function.rows > host.layout.context:
            line.close()
            line = LinearCache(host)
        line.feed([1] * function.rows, function)

    taken = median_ms(feed, count)
    line.close()
    return taken


def median_ms(task: Callable[[], object], rounds: int, warm_up: int = _WARM_UP) -> float:
    """Returns the median milliseconds of `rounds` calls of `task`, after `warm_up` calls."""
    taken = []
    for _ in range(rounds + warm_up):
        started = time.perf_counter()
        task()
        taken.append(time.perf_counter() - started)
    return 1e3 * median(taken[warm_up:])


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def write_result(file: Path, result: Callable[[], object]) -> int:
    """Writes `result`, a dataclass, to `file` as JSON; returns the exit code of the program."""
    try:
        value: Any = result()
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return ABSENT if isinstance(error, DeviceAbsent) else error.exit_code
    file.write_text(json.dumps(dataclasses.asdict(value)), encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafters.coreml.trial", description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--units", choices=NAMES, required=True)
    parser.add_argument("--predictions", type=int, default=300)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    return write_result(options.result, lambda: run(open_package(options.package), options.units, options.predictions))


if __name__ == "__main__":
    raise SystemExit(main())
