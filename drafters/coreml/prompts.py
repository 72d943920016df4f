"""Decides which prompts a Core ML package reads in place of a drafter on MLX: those for which it is faster.

`reader_for` follows the setting `draft_prefill`: `auto` (the package if a kept measurement found it faster), `mlx`
(never), `coreml` (always), or the directory of a package (always that one).

`python -m outrider.drafters.coreml.prompts --model D` measures once for each package, system and MLX device, keeps the
result and prints it as JSON. With `--result` it is the measurement itself: it reads prompts with both and may crash, so
`kept_trial` runs it in a process of its own, as `trial` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.drafters.coreml import converter, package, selection, trial
from outrider.drafters.coreml.host import PackageReader
from outrider.drafters.coreml.interpreter import NAMES, runtime_of
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import os_build
from outrider.drafters.coreml.selection import OfCheckpoint, OnePackage, PackageSource, read, write
from outrider.engine.kv_rows import DenseKVRows
from outrider.engine.load_checks import open_kv_rows
from outrider.engine.loading import LoadedModel
from outrider.engine.loading import load as load_model
from outrider.protocol.errors import InvalidRequest, ModelError, OutriderError

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
MODULE = "outrider.drafters.coreml.prompts"
_ROUNDS = 3
_SECONDS = 900.0
_WORTH_IT = 0.95  # of MLX's time

log = logging.getLogger(__name__)

Measure = Callable[[Path, Package, str], trial.Ending]
Tell = Callable[[str], None]


def reader_for(model: str, prefill: str, tell: Tell) -> PackageReader | None:
    """Returns the package that reads prompts for the draft `model`; None: MLX does.

    Raises:
        InvalidRequest: `prefill` is neither one of the words nor a package.
        ModelError: the package has other weights, or the draft can't be converted.
    """
    match prefill:
        case "mlx":
            return None
        case "auto":
            return _if_faster(model, tell)
        case "coreml":
            return _always(selection.packages_of(selection.checkpoint_of(model, tell), tell), tell)
    directory = Path(prefill).expanduser()
    if not (directory / package.FILE).is_file():
        raise InvalidRequest(f"draft prefill is {prefill!r}; expected auto, mlx, coreml or the directory of a package")
    return _always(OnePackage(open_package(directory, selection.checkpoint_of(model, tell))), tell)


def _always(packages: PackageSource, tell: Tell) -> PackageReader | None:
    placed = selection.place(packages, tell)
    if placed.package is None or placed.units is None:
        tell(f"prompts are read by MLX: {placed.sentence}")
        return None
    return _reader(placed.package, placed.units, 1, tell)


def _if_faster(model: str, tell: Tell) -> PackageReader | None:
    memory = converter.probes()
    if not any(memory.glob("*.prompts.json")):  # without any measurement the weights need not be hashed
        return None
    try:
        packages = selection.packages_of(selection.checkpoint_of(model, tell), tell)
        for variant in filter(packages.made, packages.variants):
            made = packages.get(variant)
            kept = recall(made, memory)
            if kept is not None and kept.least is not None:
                return _reader(made, kept.units, kept.least, tell)
    except ModelError as error:  # `auto` may find no package
        tell(f"prompts are read by MLX: {error}")
    return None


def _reader(package: Package, units: str, least: int, tell: Tell) -> PackageReader | None:
    try:
        runtime = runtime_of(package, units, [package.layout.prefill.name])
    except ModelError as error:
        tell(f"prompts are read by MLX: {error}")
        return None
    reader = PackageReader(package, runtime, least)
    tell(reader.note)
    return reader


@dataclass(frozen=True, slots=True)
class PromptTrial:
    """The median milliseconds to read prompts of `lengths` tokens, by MLX and by the package on `units`.

    With a `reason` the trial failed, and there are none.
    """

    units: str
    lengths: tuple[int, ...] = ()
    mlx_ms: tuple[float, ...] = ()
    package_ms: tuple[float, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> PromptTrial:
        """Returns the trial of these JSON fields."""
        columns = {name: tuple(fields[name]) for name in ("lengths", "mlx_ms", "package_ms")}
        return cls(str(fields["units"]), reason=str(fields.get("reason", "")), **columns)

    @property
    def least(self) -> int | None:
        """The shortest prompt in tokens from which on the package is faster; None: it is not."""
        least = None
        for length, mlx, own in zip(self.lengths, self.mlx_ms, self.package_ms, strict=True):
            faster = own < _WORTH_IT * mlx
            least = (least or length) if faster else None
        return least

    @property
    def sentence(self) -> str:
        if self.reason:
            return f"prompts are read by MLX: {self.reason}"
        last = f"{self.lengths[-1]} tokens: {self.package_ms[-1]:.1f} ms against {self.mlx_ms[-1]:.1f}"
        if self.least is None:
            return f"MLX reads prompts: it is faster than the package on {self.units} ({last})"
        return f"prompts of {self.least} tokens and more are read by the package on {self.units} ({last})"


def recall(package: Package, memory: Path) -> PromptTrial | None:
    """Returns the trial of `package` that was kept on this machine, or None."""
    kept = read(_file(package, memory), PromptTrial.of)
    return kept[0] if kept else None


def kept_trial(
    checkpoint: Path, package: Package, units: str, memory: Path, measure: Measure | None = None
) -> PromptTrial:
    """Returns the kept trial or, if there is none, that of a new measurement in a process that may crash."""
    kept = recall(package, memory)
    if kept is not None and kept.units == units:
        return kept
    ending = (measure or run_measurement)(checkpoint, package, units)
    failed = PromptTrial(units, reason=ending.reason)
    prompts = failed if ending.written is None else PromptTrial.of(json.loads(ending.written))
    write(_file(package, memory), [dataclasses.asdict(prompts)])
    return prompts


def trial_here(packages: OfCheckpoint, tell: Tell) -> PromptTrial:
    """Returns `kept_trial` of the package and unit that a drafter would run on this machine. Raises ModelError."""
    placed = selection.place(packages, tell)
    if placed.package is None or placed.units is None:
        return PromptTrial("no unit", reason=placed.sentence)
    return kept_trial(packages.checkpoint, placed.package, placed.units, converter.probes())


def run_measurement(checkpoint: Path, package: Package, units: str) -> trial.Ending:
    """Runs the measurement in a process of its own."""
    line = ["--model", str(checkpoint), "--package", str(package.path), "--units", units]
    return trial.run_program(MODULE, line, _SECONDS)


def _file(package: Package, memory: Path) -> Path:
    device = mx.default_device().type.name
    libraries = f"coremltools{version('coremltools')}-mlx{version('mlx')}-{device}"
    return memory / f"{package.manifest.key}-{os_build()}-{platform.machine()}-{libraries}.prompts.json"


def measure(model: LoadedModel, package: Package, units: str) -> PromptTrial:
    """Measures the reading of prompts as the drafter would read them.

    Raises:
        OutriderError: the package can't be run, or its model can't draft.
    """
    reader = PackageReader(package, runtime_of(package, units, [package.layout.prefill.name]), least=1)
    vocabulary = package.layout.architecture.vocab_size
    lengths = tuple(length for length in LENGTHS if length <= package.layout.context)

    def by_mlx(tokens: list[int]) -> None:
        open_kv_rows(model).prefill(tokens, None, len(tokens))

    def by_package(tokens: list[int]) -> None:
        kv_rows = open_kv_rows(model, reader)
        kv_rows.prefill(tokens, None, len(tokens))
        if not isinstance(kv_rows, DenseKVRows) or kv_rows.read != len(tokens):
            raise OutriderError("the package did not read the prompt")

    prompts = [[(7 * i + 3) % vocabulary for i in range(length)] for length in lengths]
    mlx_ms, package_ms = (
        tuple(round(trial.median_ms(partial(read_by, tokens), _ROUNDS, 1), 3) for tokens in prompts)
        for read_by in (by_mlx, by_package)
    )
    return PromptTrial(units, lengths, mlx_ms, package_ms)


def main() -> int:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("--model", required=True, help="the draft: a model directory or a Hugging Face id")
    parser.add_argument("--package", type=Path, help="with --result: the package to measure")
    parser.add_argument("--units", choices=NAMES, help="with --result: where the package runs")
    parser.add_argument("--result", type=Path, help="measure now, and write the times there")
    options = parser.parse_args()
    if options.result is not None:
        model, package = options.model, options.package
        return trial.write_result(
            options.result,
            lambda: measure(load_model(model), open_package(package, source=Path(model)), options.units),
        )
    try:
        prompts = trial_here(selection.packages_of(selection.checkpoint_of(options.model)), log.info)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    result = {"least": prompts.least, "sentence": prompts.sentence, "times": dataclasses.asdict(prompts)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
