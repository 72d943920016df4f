"""`python -m outrider.drafting.coreml.trials.trial`: one package on one compute unit, tried out. Writes what it saw.

Meant to be sacrificed: a graph the Neural Engine's compiler dislikes can end the whole process, some only after a
hundred predictions. So this runs in a process of its own (`probe` starts it), and a missing file is an answer too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.host.host import Host
from outrider.drafting.coreml.host.line import Line
from outrider.drafting.coreml.package.layout import Function
from outrider.drafting.coreml.package.package import Package, open_package
from outrider.drafting.coreml.runtime import compute_plan
from outrider.drafting.coreml.runtime.coreml_runtime import compiled_path
from outrider.drafting.coreml.runtime.devices import NAMES, REFERENCE, runtime_of
from outrider.drafting.coreml.runtime.interpreter import NumpyRuntime
from outrider.drafting.coreml.runtime.runtime import DeviceAbsent
from outrider.drafting.coreml.trials import sacrifice
from outrider.protocol.errors import ModelError, OutriderError

_STEPS = 12
_WARM_UP = 3
_TIE = 0.05  # of the logits' standard deviation


@dataclass(frozen=True, slots=True)
class Trial:
    """What a unit did with a package.

    `agreement`: share of compared rows whose best token is the interpreter's (see `agreement`); `distance`: mean total
    variation between the two distributions. `ms`: median milliseconds a call by function; `engine_share`: the share of
    its operations that Core ML plans for the Neural Engine, {} where it tells no plan. `compile_seconds` is 0 for what
    was compiled before.
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
    """Compiles, loads, compares with the interpreter, predicts `predictions` times, measures.

    Raises:
        DeviceAbsent: this machine has no such unit.
        OutriderError: the device refused or gave no numbers.
    """
    started = time.monotonic()
    if units != REFERENCE:
        compiled_path(package)
    _check_engine(units)
    compiled = time.monotonic()
    host = Host(package, runtime_of(package, units))
    loaded = time.monotonic()
    found, expected = _logits(host), _logits(Host(package, NumpyRuntime(package.mlpackage)))
    return Trial(
        units=units,
        compile_seconds=round(compiled - started, 3),
        load_seconds=round(loaded - compiled, 3),
        predictions=predictions,
        agreement=agreement(found, expected),
        distance=float(np.abs(_softmax(found) - _softmax(expected)).sum(axis=-1).mean() / 2),
        ms=_times(host, predictions),
        engine_share=_engine_share(package, units),
    )


def _check_engine(units: str) -> None:
    """Without a Neural Engine that unit would be the CPU by another name. Silence is no proof that there is none."""
    if units != "CPU_AND_NE":
        return
    try:
        there = compute_plan.has_engine()
    except ModelError:
        return
    if not there:
        raise DeviceAbsent("Core ML can't use a Neural Engine on this machine")


def _engine_share(package: Package, units: str) -> dict[str, float]:
    if units == REFERENCE:
        return {}
    try:
        return compute_plan.engine_share(package, units)
    except ModelError:  # it predicts well, wherever it does so
        return {}


def agreement(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The share of rows [R, vocab] that choose alike; where the two best are all but tied, either choice is alike."""
    top = np.argsort(-expected, axis=-1)[:, :2]
    first, second = np.take_along_axis(expected, top, axis=-1).T
    tied = (first - second <= _TIE * expected.std(axis=-1)) & (found.argmax(axis=-1) == top[:, 1])
    return float(((found.argmax(axis=-1) == top[:, 0]) | tied).mean())


def _logits(host: Host) -> NDArray[np.float32]:
    """Rows of a fixed random text, read by the prefill, by eight at once and one by one."""
    layout = host.layout
    text = np.random.default_rng(0).integers(0, layout.architecture.vocab_size, layout.context).tolist()
    line, rows = Line(host), []
    several, single = layout.functions[1], layout.functions[0]
    line.feed(text[:16], layout.prefill)
    for function, count in ((several, several.rows), *((single, 1) for _ in range(_STEPS))):
        fresh = line.feed(text[line.length : line.length + count], function)
        if fresh.logits is not None:
            rows.append(fresh.logits)
    line.close()
    return np.concatenate(rows)


def _times(host: Host, predictions: int) -> dict[str, float]:
    """Milliseconds a call: the single-row function as often as asked, the others a tenth as often."""
    single = host.layout.functions[0]
    return {
        function.name: round(_time(host, function, predictions if function is single else predictions // 10 + 1), 4)
        for function in host.layout.functions
    }


def _time(host: Host, function: Function, count: int) -> float:
    line, taken = Line(host), []
    for _ in range(count + _WARM_UP):
        if line.length + function.rows > host.layout.context:
            line.close()
            line = Line(host)
        started = time.perf_counter()
        line.feed([1] * function.rows, function)
        taken.append(time.perf_counter() - started)
    line.close()
    return 1e3 * median(taken[_WARM_UP:])


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafting.coreml.trials.trial", description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--units", choices=NAMES, required=True)
    parser.add_argument("--predictions", type=int, default=300)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        trial = run(open_package(options.package), options.units, options.predictions)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return sacrifice.ABSENT if isinstance(error, DeviceAbsent) else error.exit_code
    options.result.write_text(json.dumps(dataclasses.asdict(trial)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
