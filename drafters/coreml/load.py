"""Makes the drafter `coreml` from a package or a model directory, on whatever this machine has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from outrider.drafters.coreml import converter, package, selection
from outrider.drafters.coreml.drafter import CoreMLDrafter
from outrider.drafters.coreml.interpreter import REFERENCE, NumpyRuntime, runtime_of
from outrider.drafters.coreml.layout import read as read_architecture
from outrider.drafters.coreml.package import open_package
from outrider.drafters.coreml.selection import OfCheckpoint, OnePackage, PackageSource, Selection
from outrider.drafters.drafter import Drafter
from outrider.protocol.errors import ModelError

Tell = Callable[[str], None]
log = logging.getLogger(__name__)


def load(model: str, tell: Tell) -> Drafter:
    """The drafter for `model`: a package directory, a model directory or a Hugging Face id.

    A model is converted first (once). Without Core ML the reference interpreter runs it; where Core ML's trial goes
    wrong on every unit, MLX does. `tell` gets a sentence on each.

    Raises:
        ModelError: no such model, or one the converter refuses.
    """
    packages, checkpoint = _packages(model, tell)
    placed = place(packages, tell)
    sentence = placed.sentence
    tell(sentence)
    if placed.package is not None and placed.units is not None:
        try:
            return CoreMLDrafter(placed.package, runtime_of(placed.package, placed.units), note=sentence)
        except ModelError as error:  # its trial went well, on another day
            sentence = f"{error}, drafting with MLX instead"
            tell(sentence)
    if checkpoint is None:
        raise ModelError(f"{sentence}; give the model that this package was converted from, not the package")
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(str(checkpoint), tell)


def place(packages: PackageSource, tell: Tell) -> Selection:
    """Which package runs where on this machine: what the trials chose or, without Core ML, the interpreter.

    Raises:
        ModelError: not one package can be made.
    """
    if sys.platform == "darwin":
        return selection.choose(packages, converter.probes(), tell)
    package = packages.get(packages.variants[0])
    return Selection(package, REFERENCE, f"drafting with {NumpyRuntime.name}", ())


def _packages(model: str, tell: Tell) -> tuple[PackageSource, Path | None]:
    """What the drafter may run, and the checkpoint it is of where that is known."""
    given = Path(model).expanduser()
    if (given / package.FILE).is_file():
        return OnePackage(open_package(given)), None
    checkpoint = checkpoint_of(model, tell)
    return packages_of(checkpoint, tell), checkpoint


def packages_of(checkpoint: Path, tell: Tell = log.info) -> OfCheckpoint:
    """The packages of a model directory in this machine's cache; `tell` hears of conversions."""
    return OfCheckpoint.of(checkpoint, context_of(checkpoint), _stages(tell))


def checkpoint_of(model: str, tell: Tell = log.info) -> Path:
    """The directory of a model that is given as a directory or a Hugging Face id. Raises ModelError for neither."""
    from outrider.engine.loading import find

    return find(model, tell)


def context_of(checkpoint: Path) -> int:
    """The default context, or the model's own where that is shorter."""
    from mlx_lm.utils import load_config

    return min(converter.DEFAULT_CONTEXT, read_architecture(load_config(checkpoint)).max_positions)


def _stages(tell: Tell) -> converter.Progress:
    """Tells each stage of a conversion once."""
    told: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            tell(f"converting the draft for Core ML: {stage}")

    return progress
