"""A digest by which ranks find that their folders hold another model, without reading all of it.

Of the configuration every byte counts, of each tensor its name, format and shape and its first bytes: other weights
differ there, if they differ at all. Knows files; nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from outrider.protocol.errors import ModelError

_EACH = 1024  # bytes of a tensor


def digest(folder: Path) -> str:
    """Of the model in this folder, in hexadecimal. Raises ModelError when a weights file can't be read."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                _add(found, file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ModelError(f"{path} is no safetensors file ({error!r}): fetch the model again") from error
    return found.hexdigest()


def _add(found: hashlib._Hash, file: BinaryIO) -> None:
    size = int.from_bytes(file.read(8), "little")
    header = file.read(size)
    found.update(header)
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            found.update(file.read(min(end - begin, _EACH)))
