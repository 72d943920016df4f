"""Decides which prompts a Core ML package reads in place of a drafter on MLX: those for which it is faster.

`reader_for` follows the setting `draft_prefill`: `auto` (the package if a kept measurement found it faster), `mlx`
(never), `coreml` (always), or the directory of a package (always that one).

`python -m outrider.drafters.coreml.prompts --model D` measures once for each package, system and MLX device, keeps the
result and prints it as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path

from outrider.drafters.coreml import package, selection, trial
from outrider.drafters.coreml.drafter import PackageReader
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import open_runtime
from outrider.drafters.coreml.selection import OnePackage, Packages, PackageSource, Tell
from outrider.drafters.coreml.trial import PromptTimes, Trials
from outrider.engine.loading import find
from outrider.protocol.errors import InvalidRequest, ModelError, OutriderError

log = logging.getLogger(__name__)


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
            return _always(Packages(find(model), tell), tell)
    directory = Path(prefill).expanduser()
    if not (directory / package.MANIFEST).is_file():
        raise InvalidRequest(f"draft prefill is {prefill!r}; expected auto, mlx, coreml or the directory of a package")
    return _always(OnePackage(open_package(directory, find(model))), tell)


def _always(packages: PackageSource, tell: Tell) -> PackageReader | None:
    chosen = selection.choose(packages, tell)
    if chosen.package is None or chosen.row is None:
        tell(f"prompts are read by MLX: {chosen.sentence}")
        return None
    return _reader(chosen.package, chosen.row.units, 1, tell)


def _if_faster(model: str, tell: Tell) -> PackageReader | None:
    if not Trials.any_prompts():  # without any measurement the weights need not be hashed
        return None
    try:
        packages = Packages(find(model), tell)
        for row in Trials(packages.source_hash).rows:
            times = row.prompts_here
            if times is not None and times.least is not None and packages.made(row.options):
                made = packages.get(row.options)
                if made.manifest.key == row.key:
                    return _reader(made, row.units, times.least, tell)
    except ModelError as error:  # `auto` may find no package
        tell(f"prompts are read by MLX: {error}")
    return None


def _reader(package: Package, units: str, least: int, tell: Tell) -> PackageReader | None:
    try:
        runtime = open_runtime(package, units, [package.layout.prefill.name])
    except ModelError as error:
        tell(f"prompts are read by MLX: {error}")
        return None
    reader = PackageReader(package, runtime, least)
    tell(reader.note)
    return reader


def timed_here(packages: Packages, tell: Tell) -> PromptTimes:
    """Returns the kept times of the package and unit that a drafter would run on this machine, or measures them.

    Raises:
        ModelError: no package of the draft can be made.
    """
    chosen = selection.choose(packages, tell)
    if chosen.package is None or chosen.row is None:
        return PromptTimes("no unit", "", reason=chosen.sentence)
    times = chosen.row.prompts_here
    if times is None:
        times = trial.time_prompts(chosen.package, chosen.row.units, packages.checkpoint)
        Trials(packages.source_hash).add(dataclasses.replace(chosen.row, prompts=times))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafters.coreml.prompts", description=__doc__)
    parser.add_argument("--model", required=True, help="the directory of the draft")
    options = parser.parse_args()
    try:
        times = timed_here(Packages(find(options.model)), log.info)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    result = {"least": times.least, "sentence": times.sentence, "times": dataclasses.asdict(times)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
