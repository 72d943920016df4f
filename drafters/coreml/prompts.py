"""`python -m outrider.drafters.coreml.prompts --model D`: from which length on the package reads prompts quicker.

Measured once for a package, a system and an MLX device, and kept: a drafter on MLX looks it up. Prints one JSON object.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.drafters.coreml import load
from outrider.drafters.coreml.converter import converter
from outrider.drafters.coreml.package.package import Package
from outrider.drafters.coreml.runtime.runtimes import os_build
from outrider.drafters.coreml.trials import trial
from outrider.drafters.coreml.trials.prompt_trial import PromptTimes
from outrider.drafters.coreml.trials.selection import OfCheckpoint, read, write
from outrider.protocol.errors import OutriderError

MODULE = "outrider.drafters.coreml.trials.prompt_trial"
_SECONDS = 900.0
_WORTH_IT = 0.95  # of MLX's time

log = logging.getLogger(__name__)

Measure = Callable[[Path, Package, str], trial.Ending]


@dataclass(frozen=True, slots=True)
class PromptTrial:
    """`times` as measured, None when the trial failed, and then `reason` says why."""

    units: str
    times: PromptTimes | None
    reason: str = ""

    @property
    def least(self) -> int | None:
        """Prompts of so many tokens and more are read quicker by the package; None: none are."""
        if self.times is None:
            return None
        found = None
        for length, mlx, package in zip(self.times.lengths, self.times.mlx_ms, self.times.package_ms, strict=True):
            quicker = package < _WORTH_IT * mlx
            found = (found or length) if quicker else None
        return found

    @property
    def sentence(self) -> str:
        if self.times is None:
            return f"prompts are read by MLX: {self.reason}"
        package_ms, mlx_ms = self.times.package_ms[-1], self.times.mlx_ms[-1]
        last = f"{self.times.lengths[-1]} tokens: {package_ms:.1f} ms against {mlx_ms:.1f}"
        if self.least is None:
            return f"MLX reads prompts: it is faster than the package on {self.units} ({last})"
        return f"prompts of {self.least} tokens and more are read by the package on {self.units} ({last})"


def recall(package: Package, memory: Path) -> PromptTrial | None:
    """What was found out about `package` on this machine, if anything was."""
    kept = read(_file(package, memory), _prompts)
    return kept[0] if kept else None


def found(checkpoint: Path, package: Package, units: str, memory: Path, measure: Measure | None = None) -> PromptTrial:
    """What `recall` knows or, if nothing, what a measurement in a process that may die finds now."""
    known = recall(package, memory)
    if known is not None and known.units == units:
        return known
    ending = (measure or measured)(checkpoint, package, units)
    told = None if ending.written is None else _times(json.loads(ending.written))
    prompts = PromptTrial(units, told, ending.reason)
    write(_file(package, memory), [dataclasses.asdict(prompts)])
    return prompts


def here(packages: OfCheckpoint, tell: Callable[[str], None]) -> PromptTrial:
    """What is found for the package and the unit that a drafter would run on this machine. Raises ModelError."""
    placed = load.place(packages, tell)
    if placed.package is None or placed.units is None:
        return PromptTrial("no unit", None, placed.sentence)
    return found(packages.checkpoint, placed.package, placed.units, converter.probes())


def measured(checkpoint: Path, package: Package, units: str) -> trial.Ending:
    """The measurement itself."""
    line = ["--model", str(checkpoint), "--package", str(package.path), "--units", units]
    return trial.run_program(MODULE, line, _SECONDS)


def any_kept(memory: Path) -> bool:
    """Whether anything was ever measured here; a package need not be looked for where nothing was."""
    return any(memory.glob("*.prompts.json"))


def _file(package: Package, memory: Path) -> Path:
    device = mx.default_device().type.name
    libraries = f"coremltools{version('coremltools')}-mlx{version('mlx')}-{device}"
    return memory / f"{package.manifest.key}-{os_build()}-{platform.machine()}-{libraries}.prompts.json"


def _prompts(fields: dict[str, Any]) -> PromptTrial:
    times = None if fields["times"] is None else _times(fields["times"])
    return PromptTrial(str(fields["units"]), times, str(fields["reason"]))


def _times(fields: dict[str, Any]) -> PromptTimes:
    lengths = tuple(int(length) for length in fields["lengths"])
    mlx_ms, package_ms = (tuple(float(ms) for ms in fields[name]) for name in ("mlx_ms", "package_ms"))
    return PromptTimes(str(fields["units"]), lengths, mlx_ms, package_ms)


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafters.coreml.prompts", description=__doc__)
    parser.add_argument("--model", required=True, help="the draft: a model directory or a Hugging Face id")
    options = parser.parse_args()
    try:
        prompts = here(load.packages_of(load.checkpoint_of(options.model)), log.info)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    times = None if prompts.times is None else dataclasses.asdict(prompts.times)
    told = {"least": prompts.least, "sentence": prompts.sentence, "times": times}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
