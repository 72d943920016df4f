"""A converted model on disk, opened and checked against its manifest: layout, embedding and rotations.

The manifest names the package's source, its content, and the hash of each file. `RopeArrays` are the rotations of every
position, found by rotating unit vectors with the model's own rope module: there is no rotary formula here, so any
scaling that mlx-lm supports is right. `CheckpointSource` is the checkpoint that a package is made from, loaded lazily,
with its fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_config, load_model
from numpy.typing import NDArray

from outrider.drafters.coreml import layout, saved
from outrider.drafters.coreml.layout import DecoderArchitecture, Mode, PackageFunction, PackageLayout
from outrider.drafters.coreml.saved import SavedModel
from outrider.protocol.errors import ModelError, first_line

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source_hash` is `fingerprint` of the checkpoint; `files` maps a path in the package to its SHA-256."""

    layout: PackageLayout
    source: str
    source_hash: str
    parameters: int
    files: dict[str, str]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    format: int = field(default=FORMAT)

    @property
    def key(self) -> str:
        """Identifies the package's content: the same for the same weights, layout and converter."""
        return self.files["model.mlpackage/weights"][:16] + self.files["model.mlpackage/model"][:16]

    def write(self, directory: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Returns the manifest of the package in `directory`.

        Raises:
            ModelError: there is none, it has another format, or it is not a manifest.
        """
        path = directory / FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{directory} is not a converted model ({error}); create one with `outrider convert`"
            ) from error
        version = fields.get("format") if isinstance(fields, dict) else None
        if version != FORMAT:
            raise ModelError(f"{path} has format {version!r}; this version reads {FORMAT}: convert the model again")
        try:
            return cls(**{**fields, "layout": _layout(fields["layout"]), "notes": tuple(fields["notes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is not a manifest ({error}); convert the model again") from error


def _layout(fields: dict[str, Any]) -> PackageLayout:
    return PackageLayout(
        architecture=DecoderArchitecture(**fields["architecture"]),
        mode=Mode(fields["mode"]),
        weights=str(fields["weights"]),
        context=int(fields["context"]),
        slots=int(fields["slots"]),
        functions=tuple(PackageFunction(**function) for function in fields["functions"]),
    )


_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class RopeArrays:
    """`cos` and `sin`, float32 [positions, head_dim / 2]: x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin by halves."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def probe(rope: Callable[..., mx.array], head_dim: int, positions: int) -> RopeArrays:
    """Returns the table of `rope` for positions 0 .. `positions` - 1.

    Raises:
        ModelError: `rope` is not a rotation of the two halves of a head (a traditional or partial rope).
    """
    half = head_dim // 2

    def rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
        wide = np.broadcast_to(x, (1, 1, positions, head_dim)).astype(np.float32)
        return np.asarray(rope(mx.array(wide), offset=0).astype(mx.float32)).reshape(positions, head_dim)

    first = np.concatenate([np.ones(half), np.zeros(half)]).astype(np.float32)
    turned = rotate(first)
    table = RopeArrays(np.ascontiguousarray(turned[:, :half]), np.ascontiguousarray(turned[:, half:]))
    sample = np.random.default_rng(0).standard_normal(head_dim).astype(np.float32)
    if not np.allclose(rotate(sample), apply(table, sample), atol=_TOLERANCE * float(np.abs(sample).max())):
        raise ModelError(
            "this model's rope does not rotate the two halves of a head (a traditional or partial rope); "
            "the coreml graph does (use --draft-backend mlx for this one)"
        )
    return table


def apply(table: RopeArrays, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns `x` [head_dim] rotated to every position of the table: [positions, head_dim]."""
    low, high = np.split(x, 2)
    return np.concatenate([low * table.cos - high * table.sin, high * table.cos + low * table.sin], axis=-1)


_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A model whose weights are not read yet."""

    path: Path
    model: nn.Module
    architecture: DecoderArchitecture


def open_source(path: Path) -> CheckpointSource:
    """Returns the checkpoint in the directory `path`.

    Raises:
        ModelError: there is no model, its architecture is refused, or its weights contradict config.json.
    """
    config = _config(path)
    sizes = layout.read(config)
    _check_head(path, sizes)
    try:
        model, _ = load_model(path, lazy=True)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise ModelError(f"{path} can't be loaded: {first_line(error)}") from error
    return CheckpointSource(path, model, sizes)


def fingerprint(path: Path) -> str:
    """Returns a hash of the checkpoint's config.json and weight files, which does not depend on the folder."""
    digest = hashlib.sha256()
    for file in [path / "config.json", *_weight_files(path)]:
        digest.update(file.name.encode())
        digest.update(file_hash(file).encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("model*.safetensors"))


def _config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file() or not _weight_files(path):
        raise ModelError(f"{path} is not a model folder; expected config.json and model*.safetensors in it")
    try:
        return dict(load_config(path))
    except ValueError as error:
        raise ModelError(f"{path / 'config.json'} is not JSON: {first_line(error)}") from error


def _check_head(path: Path, sizes: DecoderArchitecture) -> None:
    """Raises ModelError if config.json and the checkpoint disagree on tied embeddings."""
    heads = {name: file for file in _weight_files(path) for name in _tensor_names(file) if name == "lm_head.weight"}
    if not sizes.tied and not heads:
        raise ModelError(
            f"{path}: config.json says the output head is untied, but the checkpoint has no lm_head.weight; "
            "expected one of the two to change (tie_word_embeddings: true)"
        )
    if sizes.tied and heads and not _same_as_embedding(path, heads["lm_head.weight"]):
        raise ModelError(
            f"{path}: config.json says the output head is tied to the embedding, but the checkpoint has another "
            "lm_head.weight; expected tie_word_embeddings: false or no such tensor"
        )


def _same_as_embedding(path: Path, head_file: Path) -> bool:
    name = "model.embed_tokens.weight"
    for file in _weight_files(path):
        if name in _tensor_names(file):
            head, embedding = _tensor(head_file, "lm_head.weight"), _tensor(file, name)
            return head.shape == embedding.shape and bool(mx.array_equal(head, embedding))
    return False


def _tensor(file: Path, name: str) -> mx.array:
    tensors: Any = mx.load(str(file))
    tensor: mx.array = tensors[name]
    return tensor


def _tensor_names(file: Path) -> list[str]:
    """Returns the names in a safetensors header; [] if it can't be read (loading will raise)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return list(json.loads(stream.read(min(length, 1 << 27))))
        except ValueError:
            return []


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
    """An opened package: `embedding` [vocab, hidden] is read from the file on demand; `rope` has a row per position."""

    path: Path
    manifest: Manifest
    embedding: NDArray[np.floating]
    rope: RopeArrays

    @property
    def layout(self) -> PackageLayout:
        return self.manifest.layout

    @property
    def mlpackage(self) -> Path:
        return self.path / MLPACKAGE

    @property
    def weight_bytes(self) -> int:
        return (self.path / _FILES[f"{MLPACKAGE}/weights"]).stat().st_size


def file_hashes(directory: Path) -> dict[str, str]:
    """Returns the manifest's `files` for the package in `directory`."""
    return {name: file_hash(directory / path) for name, path in _FILES.items()}


def open_package(directory: Path, source: Path | None = None) -> Package:
    """Returns the package in `directory` after checking it.

    Args:
        source: the checkpoint that it should have been made from, if known.

    Raises:
        ModelError: there is no package, a file is not the manifest's, or the weights are not those of `source`.
    """
    manifest = Manifest.read(directory)
    _check_files(directory, manifest)
    _check_ports(directory, manifest.layout, saved.read(directory / MLPACKAGE))
    if source is not None:
        check_source(directory, manifest, source)
    cos, sin = np.load(directory / ROPE)
    return Package(directory, manifest, np.load(directory / EMBEDDING, mmap_mode="r"), RopeArrays(cos, sin))


def check_source(directory: Path, manifest: Manifest, source: Path) -> None:
    """Raises ModelError unless the package was made from the checkpoint `source`."""
    actual = fingerprint(source)
    if actual != manifest.source_hash:
        raise ModelError(
            f"{directory} was made from {manifest.source} ({manifest.source_hash[:12]}), other weights than {source} "
            f"has ({actual[:12]}); convert that model, or name the one that this package was made from"
        )


def _check_files(directory: Path, manifest: Manifest) -> None:
    for name, path in _FILES.items():
        if not (directory / path).is_file():
            raise ModelError(f"{directory} lacks {path}; convert the model again")
        if file_hash(directory / path) != manifest.files.get(name):
            raise ModelError(f"{directory / path} is not the file its manifest names; convert the model again")


def _check_ports(directory: Path, layout: PackageLayout, model: SavedModel) -> None:
    """Raises ModelError if the functions on disk do not take the inputs of the manifest."""
    for function in layout.functions:
        declared = {tensor.name: (tensor.shape, tensor.integer) for tensor in layout.inputs(function)}
        on_disk = model.functions.get(function.name)
        ports = on_disk.inputs if on_disk else ()
        actual = {port.name: (port.shape, port.dtype == "INT32") for port in ports}
        if actual != declared:
            raise ModelError(
                f"{directory}: the manifest does not match the package's function {function.name}; "
                "convert the model again"
            )
