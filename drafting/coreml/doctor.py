"""`python -m outrider.drafting.coreml.doctor`: this machine and what each placement of a drafter would cost, as JSON.

The data of `outrider doctor`, which renders it; here so that the command line never imports MLX.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass

import mlx.core as mx

from outrider.drafting.coreml import load, placements
from outrider.drafting.coreml.placements import Placement
from outrider.drafting.coreml.trials import machine
from outrider.drafting.coreml.trials.machine import Machine
from outrider.drafting.coreml.trials.packages import OfCheckpoint
from outrider.protocol.errors import ModelError, OutriderError


@dataclass(frozen=True, slots=True)
class Report:
    """`model` is the draft the placements are for; None: no draft was named, so there are none."""

    machine: Machine
    model: str | None
    placements: tuple[Placement, ...]


def examine(model: str | None, try_now: bool) -> Report:
    """Looks at the machine and, with a draft `model` (a directory or an id), at where it could run.

    Args:
        try_now: convert the draft if need be, and try every Core ML unit; minutes on a first run.

    Raises:
        ModelError: there is no such model.
    """
    found = machine.inspect()
    if model is None:
        return Report(found, None, ())
    checkpoint = load.checkpoint_of(model)
    places = [placements.on_mlx(checkpoint, mx.cpu)]
    if found.mlx_device == "gpu":
        places.insert(0, placements.on_mlx(checkpoint, mx.gpu))
    try:
        places += _converted(load.packages_of(checkpoint), try_now)
    except ModelError as error:
        places.append(Placement("Core ML", False, note=str(error)))
    return Report(found, str(checkpoint), tuple(places))


def _converted(packages: OfCheckpoint, try_now: bool) -> list[Placement]:
    """Where the draft could run once it is a package."""
    made = [variant for variant in packages.variants if packages.made(variant)]
    if not made and not try_now:
        return [Placement("Core ML", False, note="the draft is not converted yet: run `outrider doctor --probe`")]
    places = placements.on_core_ml(packages, try_now)
    kept = [variant for variant in packages.variants if packages.made(variant)] or list(packages.variants)
    places.append(placements.on_interpreter(packages.get(kept[0])))
    reading = placements.on_prompts(packages, try_now)
    return places if reading is None else [*places, reading]


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafting.coreml.doctor", description=__doc__)
    parser.add_argument("--model", help="the draft: a model directory or a Hugging Face id")
    parser.add_argument("--probe", action="store_true", help="convert it and try Core ML out, which can take minutes")
    options = parser.parse_args()
    try:
        report = examine(options.model, options.probe)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(dataclasses.asdict(report)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
