"""Makes the drafter `coreml` from a package or a model directory, on whatever this machine has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from draft_worker.coreml import converter, manifest, probe, store
from draft_worker.coreml.architecture import read as read_architecture
from draft_worker.coreml.coreml_runtime import CoreMLRuntime
from draft_worker.coreml.drafter import CoreMLDrafter
from draft_worker.coreml.interpreter import NumpyRuntime
from draft_worker.coreml.package import Package, open_package
from draft_worker.drafter import Drafter
from protocol.errors import ModelError

Tell = Callable[[str], None]
log = logging.getLogger(__name__)


def load(model: str, tell: Tell) -> Drafter:
    """The drafter for `model`: a package directory, a model directory or a Hugging Face id.

    A model is converted first (once). Without Core ML the reference interpreter runs it; where Core ML's trial goes
    wrong on every unit, MLX does. `tell` gets a sentence on each.

    Raises:
        ModelError: no such model, or one the converter refuses.
    """
    package, checkpoint = _package(model, tell)
    if sys.platform != "darwin":
        runtime = NumpyRuntime(package.mlpackage)
        tell(f"drafting with {runtime.name}")
        return CoreMLDrafter(package, runtime)
    tell("trying Core ML out on this draft (once)")
    choice = probe.choose(package, store.root() / "probes")
    tell(choice.sentence)
    if choice.units is not None:
        return CoreMLDrafter(package, CoreMLRuntime(package, choice.units), note=choice.sentence)
    if checkpoint is None:
        raise ModelError(f"{choice.sentence}; name the model this package was made from instead of the package")
    from draft_worker.mlx import MlxDrafter

    return MlxDrafter.load(str(checkpoint), tell)


def _package(model: str, tell: Tell) -> tuple[Package, Path | None]:
    """The package to run, and the checkpoint it is of where that is known."""
    given = Path(model).expanduser()
    if (given / manifest.FILE).is_file():
        return open_package(given), None
    checkpoint = checkpoint_of(model, tell)
    return store.package_of(checkpoint, _options(checkpoint), _stages(tell)), checkpoint


def checkpoint_of(model: str, tell: Tell = log.info) -> Path:
    """The directory of a model that is given as a directory or a Hugging Face id. Raises ModelError for neither."""
    from engine.loading import find

    return find(model, tell)


def package_for(checkpoint: Path, convert: bool) -> Package | None:
    """The package the drafter would use for `checkpoint`; None when it is not made yet and `convert` is False."""
    options = _options(checkpoint)
    if not convert and not store.directory_of(checkpoint, options).exists():
        return None
    return store.package_of(checkpoint, options)


def _options(checkpoint: Path) -> converter.Options:
    return converter.Options(context=context_of(checkpoint))


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
