"""The packages this machine made for itself: a draft model's own package, converted the first time it is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from outrider.drafting.coreml.converter import converter
from outrider.drafting.coreml.converter.converter import Options, Progress
from outrider.drafting.coreml.package import manifest, source
from outrider.drafting.coreml.package.package import Package, open_package
from outrider.protocol.errors import ModelError


def root() -> Path:
    """Where Outrider keeps what it can make again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider" / "coreml"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "coreml"


def probes() -> Path:
    """Where it keeps what it tried out."""
    return root() / "probes"


def directory_of(source_hash: str, options: Options, folder: Path | None = None) -> Path:
    """Where the package of the checkpoint with this `source.fingerprint` lies, once it is made."""
    key = f"{source_hash[:16]}-{options.mode.value}-{options.weights}-{options.context}"
    return (folder or root()) / f"{key}-f{manifest.FORMAT}"


def package_of(model: Path, options: Options, progress: Progress | None = None, folder: Path | None = None) -> Package:
    """The package of the checkpoint `model` from `folder` (`root()` by default), converted if it is not there.

    Raises:
        ModelError: the model is refused, or can't be converted here.
    """
    directory = directory_of(source.fingerprint(model), options, folder)
    if not directory.exists():
        try:
            converter.convert(model, directory, options, progress)
        except ModelError:
            if not directory.exists():  # else another process made it meanwhile
                raise
    return open_package(directory, source=model)
