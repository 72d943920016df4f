"""A digest that identifies the model in a folder, its JSON files, hashes, files replaced as a whole, and the cache.

Knows files; knows nothing of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from outrider.protocol.errors import CacheError, ModelError

_SAMPLED_BYTES = 1024  # of each tensor
_DIGEST_DIGITS = 16
CACHE_VARIABLE = "OUTRIDER_CACHE"
_MAX_UNUSED_SECONDS = 30 * 24 * 3600

_in_use: dict[Path, BinaryIO] = {}
"""Files of folders in the cache that this process uses; their locks keep the folders until it ends."""


def model_digest(folder: Path) -> str:
    """Returns "abc..-def.." for a model's folder: digests of its config.json, and of its weights if it has any.

    The first covers the whole config.json, the second each tensor's name, format, shape and first bytes. Other weights
    differ in these, too, so the rest is not read.

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


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if there is none. Raises ModelError if it holds something else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(fields, ensure_ascii=False).encode()  # an escape can stand for half a surrogate pair
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download the model again") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds {type(fields).__name__}; expected a JSON object")
    return fields


def read_weight_map(folder: Path) -> dict[str, Any]:
    """Returns the file of each tensor by a model's index; empty if there is no index. Raises ModelError."""
    places = read_json(path := folder / "model.safetensors.index.json").get("weight_map", {})
    if not isinstance(places, dict):
        raise ModelError(f"{path} has a weight_map that is not an object; download the model again")
    return places


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
    if named := os.environ.get(CACHE_VARIABLE):
        try:
            return Path(named).expanduser().absolute()
        except (RuntimeError, OSError) as error:
            raise ModelError(f"{CACHE_VARIABLE} is {named}, which is not a folder: {error}") from None
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """Returns `outrider` in the folder that `variable` names, or in `default` in the user's home; it need not exist."""
    try:
        return Path(os.environ.get(variable) or Path.home() / default) / "outrider"
    except RuntimeError:  # there is no home folder
        return Path(os.devnull) / "outrider"


def content_hash(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal; cached until the file is written to.

    Raises:
        ModelError: the file can't be read.
    """
    try:
        status = path.stat()
        identity = f"{path.resolve()}|{status.st_ino}|{status.st_size}|{status.st_mtime_ns}"
        note = cache_folder() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if has_content(note):
            return note.read_text()
        digest = file_hash(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}") from None
    with _cache_errors():
        replace_file(note, digest)
    return digest


def use_cached(folder: Path, holds: str) -> bool:
    """Returns whether the folder has the file `holds`; it then stays while this process runs, and for 30 days."""
    path = folder / holds
    with suppress(OSError):
        file = path.open("rb")
        fcntl.flock(file, fcntl.LOCK_SH)
        _in_use[path] = file
        os.utime(folder)
    return has_content(path)


def has_content(path: Path) -> bool:
    """Returns whether this file exists, can be found by this user and is not empty."""
    return os.path.isfile(path) and os.path.getsize(path) > 0


@contextmanager
def _cache_errors() -> Iterator[None]:
    """Raises CacheError in place of an OSError: the cache can't be written."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the model can't be stored in {cache_folder()}: {error.strerror or error}; free some space, or choose"
            f" another folder with {CACHE_VARIABLE}"
        ) from None


@_cache_errors()
def make_cached(folder: Path, make: Callable[[Path], object], holds: str) -> Path:
    """Lets `make` fill a folder of the cache once, completely or not at all, for all later runs, if the file `holds` is
    missing in it. Returns the folder. Raises CacheError, or what `make` raises.

    It is filled under another name and renamed when it is complete; other processes wait for a lock, which is freed
    when its holder ends. The suffix of its name is its version, which replaces other versions. What killed processes
    left next to it is removed, and so are folders with the same file `holds` that no process uses and none has used for
    30 days.
    """
    if use_cached(folder, holds):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as unfinished:
        if not use_cached(folder, holds):
            unfinished.mkdir()
            make(unfinished)
            _sync_files(unfinished)
            for old in folder.parent.glob(f"{folder.stem}*"):
                if old.stem == folder.stem:  # another version, or this one damaged
                    shutil.rmtree(old, ignore_errors=True)
            unfinished.rename(folder)
            use_cached(folder, holds)
    _remove_unused(folder.parent, holds)
    return folder


def _sync_files(folder: Path) -> None:
    """Writes a folder's files to disk, so that a loss of power leaves them whole once the folder has its name."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[Path]:
    """Locks all versions of a folder; yields a path for one that is not complete, or no longer, and removes it."""
    unfinished, lock = (folder.with_name(f".{folder.stem}.{suffix}") for suffix in ("unfinished", "lock"))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
        try:
            yield unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _remove_unused(parent: Path, holds: str) -> None:
    for entry in list(parent.iterdir()):
        folder = parent / entry.name.removeprefix(".")
        with suppress(OSError), _locked(folder, fcntl.LOCK_NB) as removed, (folder / holds).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.stat().st_mtime < time.time() - _MAX_UNUSED_SECONDS:
                folder.rename(removed)
