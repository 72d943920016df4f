"""A digest that identifies the model in a folder, hashes of files, and files that are replaced as a whole.

The digest covers the whole config.json, and each tensor's name, format, shape and first bytes. Other weights differ in
these, too, so the rest is not read. Knows files; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from outrider.protocol.errors import ModelError

_SAMPLED_BYTES = 1024  # of each tensor
_DIGEST_DIGITS = 16
CACHE_VARIABLE = "OUTRIDER_CACHE"


def model_digest(folder: Path) -> str:
    """Returns "abc..-def.." for a model's folder: digests of its config.json, and of its weights if it has any.

    Raises:
        ModelError: a file can't be read.
    """
    try:
        config = hashlib.sha256((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} has no readable config.json ({error}): download the model again") from None
    weights, files = hashlib.sha256(), sorted(folder.glob("model*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as file:
                _update_digest(weights, file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ModelError(f"{path} is not a safetensors file ({error!r}): download the model again") from error
    return f"{config.hexdigest()[:_DIGEST_DIGITS]}-{weights.hexdigest()[:_DIGEST_DIGITS] if files else ''}"


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_match(ours: str, theirs: str) -> bool:
    """Returns whether two digests can be of the same model. If one has no weights, only config.json is compared."""
    config, _, weights = ours.partition("-")
    other_config, _, other_weights = theirs.partition("-")
    return config == other_config and (weights == other_weights or not (weights and other_weights))


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Writes a file atomically: readers see the old file or the new one. Creates missing folders. Raises OSError.

    `mode`: the permissions of the file, less the process's umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder, path.name)
        part.touch(mode)
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)


def _update_digest(weights: hashlib._Hash, file: BinaryIO) -> None:
    size = int.from_bytes(file.read(8), "little")
    header = file.read(size)
    weights.update(header)
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            weights.update(file.read(min(end - begin, _SAMPLED_BYTES)))


def cache_folder() -> Path:
    """Returns `$OUTRIDER_CACHE`, or `outrider` in the user's cache folder; it need not exist."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise ModelError(f"{CACHE_VARIABLE} is {named}, which is not a folder: {error}") from None
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """Returns `outrider` in the folder that `variable` names, or in `default` in the user's home; it need not exist."""
    try:
        return Path(os.environ.get(variable) or Path.home() / default) / "outrider"
    except RuntimeError:  # there is no home folder
        return Path(os.devnull) / "outrider"
