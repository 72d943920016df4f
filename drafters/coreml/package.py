"""A converted model on disk, opened and checked against its manifest: layout, embedding, rotations, expected logits."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.layout import PackageLayout
from outrider.protocol.digest import file_hash, model_digest
from outrider.protocol.errors import ModelError

MANIFEST_FORMAT = 5
MANIFEST_FILE = "manifest.json"
MLPACKAGE = "model.mlpackage"
EMBEDDING_FILE = "embedding.npy"
ROPE_FILE = "rope.npy"
EXPECTED_FILE = "expected.npy"
MODEL_PATH = Path(MLPACKAGE, "Data", "com.apple.CoreML", "model.mlmodel")
WEIGHTS_PATH = MODEL_PATH.parent / "weights" / "weight.bin"
HASHED_FILES = tuple(map(str, (MODEL_PATH, WEIGHTS_PATH, EMBEDDING_FILE, ROPE_FILE, EXPECTED_FILE)))


def import_coremltools(part: str = "") -> Any:
    """Returns the coremltools module, or its `part` (".proto.MIL_pb2"), without its warnings about missing Core ML,
    torch or scikit-learn. Raises ModelError if it is not installed."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # coremltools imports transformers, which warns that torch is missing
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return importlib.import_module(f"coremltools{part}")
    except ImportError as error:
        raise ModelError(
            f"the coreml drafter needs coremltools ({error}); pip install 'coremltools>=9.0', with Python 3.13 or older"
        ) from error
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The source of a package, its content, and the hash of each file. `source_hash`: the checkpoint's
    `protocol.digest`; `files` maps a path in the package to its SHA-256."""

    layout: PackageLayout
    source: str
    source_hash: str
    parameters: int
    files: dict[str, str]
    versions: dict[str, str]
    format: int = MANIFEST_FORMAT

    @property
    def key(self) -> str:
        """Identifies the package's content: the same for the same weights, layout and converter."""
        return self.files[str(WEIGHTS_PATH)][:16] + self.files[str(MODEL_PATH)][:16]

    def write(self, directory: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Returns the manifest of the package in `directory`.

        Raises:
            ModelError: there is none, it has another format, or it is not a manifest.
        """
        path = directory / MANIFEST_FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{directory} is not a converted model ({error}); create one with `outrider convert`"
            ) from error
        version = fields.get("format") if isinstance(fields, dict) else None
        if version != MANIFEST_FORMAT:
            raise ModelError(
                f"{path} has format {version!r}; this version reads {MANIFEST_FORMAT}: convert the model again"
            )
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"{path} is not a manifest ({error}); convert the model again") from error


@dataclass(frozen=True, slots=True)
class Package:
    """An opened package.

    `embedding` [vocab, hidden] and `expected` are read from their files on demand. `rope` are cos and sin, float32 [2,
    context, head_dim / 2]: x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin by halves. `expected` are the logits [R, vocab]
    that MLX computes in float32 from the package's weights, for all tokens of `layout.trial_text` after its prompt.
    """

    path: Path
    manifest: Manifest
    embedding: NDArray[np.floating]
    rope: NDArray[np.float32]
    expected: NDArray[np.float32]

    @property
    def layout(self) -> PackageLayout:
        return self.manifest.layout

    @property
    def mlpackage(self) -> Path:
        return self.path / MLPACKAGE

    @property
    def weight_bytes(self) -> int:
        return (self.path / WEIGHTS_PATH).stat().st_size


def open_package(directory: Path, source: Path | None = None) -> Package:
    """Returns the package in `directory` after checking it.

    Args:
        source: the checkpoint that it must have been converted from, if known.

    Raises:
        ModelError: there is no package, a file is not the manifest's, or the weights are not those of `source`.
    """
    manifest = Manifest.read(directory)
    for path in HASHED_FILES:
        if not (directory / path).is_file():
            raise ModelError(f"{directory} lacks {path}; convert the model again")
        if file_hash(directory / path) != manifest.files.get(path):
            raise ModelError(f"{directory / path} is not the file its manifest names; convert the model again")
    if source is not None and (actual := model_digest(source)) != manifest.source_hash:
        raise ModelError(
            f"{directory} was made from {manifest.source} ({manifest.source_hash[-12:]}), other weights than {source} "
            f"has ({actual[-12:]}); convert that model, or name the one that this package was made from"
        )
    embedding, expected = (np.load(directory / name, mmap_mode="r") for name in (EMBEDDING_FILE, EXPECTED_FILE))
    return Package(directory, manifest, embedding, np.load(directory / ROPE_FILE), expected)
