"""A digest that differs between two models' folders, without reading all of their weights.

It covers the whole configuration, and of each tensor its name, format and shape and its first bytes: other weights
differ there, if they differ at all. Knows files; nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from outrider.protocol.errors import ModelError

_EACH = 1024  # bytes of a tensor
_DIGITS = 16


def digest(folder: Path) -> str:
    """Of the model in this folder: of its configuration, and of its weights if it has them, "abc..-def..".

    Raises:
        ModelError: a file can't be read.
    """
    try:
        config = hashlib.sha256((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} has no readable config.json ({error}): download the model again") from None
    found, files = hashlib.sha256(), sorted(folder.glob("model*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as file:
                _add(found, file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ModelError(f"{path} is not a safetensors file ({error!r}): download the model again") from error
    return f"{config.hexdigest()[:_DIGITS]}-{found.hexdigest()[:_DIGITS] if files else ''}"


def fits(ours: str, theirs: str) -> bool:
    """Whether these may be of one model; without weights, by the configuration alone."""
    config, _, weights = ours.partition("-")
    other_config, _, other_weights = theirs.partition("-")
    return config == other_config and (weights == other_weights or not (weights and other_weights))


def _add(found: hashlib._Hash, file: BinaryIO) -> None:
    size = int.from_bytes(file.read(8), "little")
    header = file.read(size)
    found.update(header)
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            found.update(file.read(min(end - begin, _EACH)))
