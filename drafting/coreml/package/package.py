"""A converted model on disk, opened and held to its manifest: layout, embedding and rotations, ready for a host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.package import saved
from outrider.drafting.coreml.package.layout import Layout
from outrider.drafting.coreml.package.manifest import Manifest
from outrider.drafting.coreml.package.rope import RopeTable
from outrider.drafting.coreml.package.saved import SavedModel
from outrider.drafting.coreml.package.source import file_hash, fingerprint
from outrider.protocol.errors import ModelError

MLPACKAGE = "model.mlpackage"
EMBEDDING = "embedding.npy"
ROPE = "rope.npy"
_FILES = {
    f"{MLPACKAGE}/model": Path(MLPACKAGE) / saved.MODEL,
    f"{MLPACKAGE}/weights": Path(MLPACKAGE) / saved.WEIGHTS,
    EMBEDDING: Path(EMBEDDING),
    ROPE: Path(ROPE),
}


@dataclass(frozen=True, slots=True)
class Package:
    """`embedding` is [vocab, hidden], read from the file as needed; `rope` has a row for every position."""

    path: Path
    manifest: Manifest
    embedding: NDArray[np.floating]
    rope: RopeTable

    @property
    def layout(self) -> Layout:
        return self.manifest.layout

    @property
    def mlpackage(self) -> Path:
        return self.path / MLPACKAGE

    @property
    def weight_bytes(self) -> int:
        return (self.path / _FILES[f"{MLPACKAGE}/weights"]).stat().st_size


def file_hashes(directory: Path) -> dict[str, str]:
    """The manifest's `files` for the package in `directory`."""
    return {name: file_hash(directory / path) for name, path in _FILES.items()}


def open_package(directory: Path, source: Path | None = None) -> Package:
    """The package in `directory`, checked.

    Args:
        source: the checkpoint it should have been made from, when that is known.

    Raises:
        ModelError: no package, a file that is not the manifest's, or other weights than `source` has.
    """
    manifest = Manifest.read(directory)
    _check_files(directory, manifest)
    _check_ports(directory, manifest.layout, saved.read(directory / MLPACKAGE))
    if source is not None:
        check_source(directory, manifest, source)
    cos, sin = np.load(directory / ROPE)
    return Package(directory, manifest, np.load(directory / EMBEDDING, mmap_mode="r"), RopeTable(cos, sin))


def check_source(directory: Path, manifest: Manifest, source: Path) -> None:
    """Raises ModelError unless the package was made from the checkpoint `source`."""
    found = fingerprint(source)
    if found != manifest.source_hash:
        raise ModelError(
            f"{directory} was made from {manifest.source} ({manifest.source_hash[:12]}), other weights than {source} "
            f"has ({found[:12]}); convert that model, or name the one this package is of"
        )


def _check_files(directory: Path, manifest: Manifest) -> None:
    for name, path in _FILES.items():
        if not (directory / path).is_file():
            raise ModelError(f"{directory} lacks {path}; convert the model again")
        if file_hash(directory / path) != manifest.files.get(name):
            raise ModelError(f"{directory / path} is not the file its manifest names; convert the model again")


def _check_ports(directory: Path, layout: Layout, model: SavedModel) -> None:
    """Holds the functions on disk to what the manifest says they take."""
    for function in layout.functions:
        declared = {tensor.name: (tensor.shape, tensor.integer) for tensor in layout.inputs(function)}
        on_disk = model.functions.get(function.name)
        ports = on_disk.inputs if on_disk else ()
        found = {port.name: (port.shape, port.dtype == "INT32") for port in ports}
        if found != declared:
            raise ModelError(
                f"{directory}: the manifest does not match the package's function {function.name}; "
                "convert the model again"
            )
