"""Whether a drafter on MLX has its prompts read by a package of the same weights, and by which.

Words for the setting: `auto` (where a measurement that was kept finds it quicker), `mlx` (never), `coreml` (always), or
the directory of a package (always, by that one).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.drafters.coreml import load, prompts
from outrider.drafters.coreml.converter import converter
from outrider.drafters.coreml.host.prefill import PackageReader
from outrider.drafters.coreml.package import package
from outrider.drafters.coreml.package.package import Package, open_package
from outrider.drafters.coreml.runtime.interpreter import runtime_of
from outrider.drafters.coreml.trials.selection import OnePackage, PackageSource
from outrider.protocol.errors import InvalidRequest, ModelError

Tell = Callable[[str], None]


def reader_for(model: str, prefill: str, tell: Tell) -> PackageReader | None:
    """Who reads prompts for the draft `model`; None: MLX does.

    Raises:
        InvalidRequest: `prefill` is neither one of the words nor a package.
        ModelError: the package is of other weights, or the draft can't be converted.
    """
    match prefill:
        case "mlx":
            return None
        case "auto":
            return _measured_quicker(model, tell)
        case "coreml":
            return _always(load.packages_of(load.checkpoint_of(model, tell), tell), tell)
    directory = Path(prefill).expanduser()
    if not (directory / package.FILE).is_file():
        raise InvalidRequest(f"draft prefill is {prefill!r}; expected auto, mlx, coreml or the directory of a package")
    return _always(OnePackage(open_package(directory, load.checkpoint_of(model, tell))), tell)


def _always(packages: PackageSource, tell: Tell) -> PackageReader | None:
    placed = load.place(packages, tell)
    if placed.package is None or placed.units is None:
        tell(f"prompts are read by MLX: {placed.sentence}")
        return None
    return _reader(placed.package, placed.units, 1, tell)


def _measured_quicker(model: str, tell: Tell) -> PackageReader | None:
    memory = converter.probes()
    if not prompts.any_kept(memory):  # spares hashing the weights
        return None
    try:
        packages = load.packages_of(load.checkpoint_of(model, tell), tell)
        for variant in filter(packages.made, packages.variants):
            package = packages.get(variant)
            kept = prompts.recall(package, memory)
            if kept is not None and kept.least is not None:
                return _reader(package, kept.units, kept.least, tell)
    except ModelError as error:  # nobody asked for it
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
