"""The cache of models on this machine: folders that are made once, whole or not at all, and used by every later run.

A folder is made under another name and takes its own when it is complete. Whoever needs it meanwhile waits for a lock,
which ends with its holder, so that two runs at once make it once. Knows files; knows nothing of what is in them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.protocol.errors import ModelError

VARIABLE = "OUTRIDER_CACHE"
_PIECE = 2**22


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, or `outrider` in the user's folder for caches; it need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; where it is missing, `make` fills an empty one that takes its place.

    Raises:
        ModelError: as `make` does, or the cache can't be written; nothing half-made is left behind.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        with locked(name):
            if folder.is_dir():
                return folder
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
            unfinished.mkdir(parents=True)
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise _refused(error) from None
    return folder


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Alone on this machine with the folder `name` of the cache."""
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def content_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; remembered for as long as the file is not written to.

    Raises:
        ModelError: the file can't be read.
    """
    try:
        found = path.stat()
        identity = f"{path.resolve()}|{found.st_ino}|{found.st_size}|{found.st_mtime_ns}"
        note = cache_folder() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if note.is_file():
            return note.read_text()
        digest = hash_of(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_name(f".{note.name}.{os.getpid()}")
        unfinished.write_text(digest)
        unfinished.rename(note)
    except OSError as error:
        raise _refused(error) from None
    return digest


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _refused(error: OSError) -> ModelError:
    return ModelError(
        f"the model can't be stored in {cache_folder()}: {error.strerror or error}; make room there, or name another"
        f" folder by {VARIABLE}"
    )
