"""The checkpoint a package is made from: loading it lazily, its identity, and what is odd about it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config, load_model

from outrider.drafting.coreml.package import architecture
from outrider.drafting.coreml.package.architecture import Architecture
from outrider.protocol.errors import ModelError

_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Source:
    """A model whose weights are not read yet."""

    path: Path
    model: nn.Module
    architecture: Architecture


def open_source(path: Path) -> Source:
    """The checkpoint in the directory `path`, if the converter knows it.

    Raises:
        ModelError: no model there, an architecture that is refused, or weights that contradict config.json.
    """
    config = _config(path)
    sizes = architecture.read(config)
    _check_head(path, sizes)
    try:
        model, _ = load_model(path, lazy=True)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        raise ModelError(f"{path} can't be loaded: {_first_line(error)}") from error
    return Source(path, model, sizes)


def fingerprint(path: Path) -> str:
    """A hash of the checkpoint's config.json and weight files: the same for the same weights, wherever they lie."""
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
        raise ModelError(f"{path / 'config.json'} is not JSON: {_first_line(error)}") from error


def _check_head(path: Path, sizes: Architecture) -> None:
    """Holds config.json's word on tied embeddings against what the checkpoint has."""
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
    """The names in a safetensors header; [] when the header can't be read (loading will say so)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return list(json.loads(stream.read(min(length, 1 << 27))))
        except ValueError:
            return []


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
