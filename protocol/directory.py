"""A private place for a cluster's sockets: a fresh directory that only this user may enter, with a short path.

Its maker holds a lock on it; what a killed maker left is swept away when the next one is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from outrider.protocol.endpoints import MAX_PATH, Ipc
from outrider.protocol.errors import EndpointError

MAX_NAME = 32
"""Characters of a socket's name in the directory."""
_PREFIX = "outrider-run-"
_UNBORN = ".outrider-run-"  # under this name until its lock is held, so that no sweep takes it for abandoned


class PrivateDirectory:
    """Mode 0700; `close` removes it with everything inside. Also a context manager.

    Raises:
        EndpointError: it can't be made.
    """

    def __init__(self) -> None:
        root = _root()
        _sweep(root)
        unborn = _made(root)
        self._descriptor: int | None = os.open(unborn, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self.path = unborn.rename(root / (_PREFIX + unborn.name.removeprefix(_UNBORN)))

    def endpoint(self, name: str) -> str:
        """An ipc endpoint in the directory. ValueError for a name that is no plain file name of MAX_NAME characters."""
        if not name.isascii() or not name.isidentifier() or len(name) > MAX_NAME:
            raise ValueError(f"{name!r} is not a socket name; expected letters, digits and _")
        return str(Ipc(str(self.path / name)))

    def close(self) -> None:
        """Removes the directory. Again does nothing."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def private_directory() -> PrivateDirectory:
    """A fresh private directory in the temporary folder, or in /tmp where that folder's path is long (macOS)."""
    return PrivateDirectory()


def _made(root: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_UNBORN, dir=root))
    except OSError as error:
        raise EndpointError(
            f"can't create a directory for sockets in {root}: {error.strerror}; free some space, or"
            " set TMPDIR to another folder"
        ) from None


def _root() -> Path:
    try:
        root = Path(tempfile.gettempdir()).absolute()
    except OSError:  # no file can be written in any; a directory may still be made
        return Path("/tmp")
    longest = root / (_PREFIX + "x" * 8) / ("x" * MAX_NAME)
    return root if len(os.fsencode(longest)) <= MAX_PATH else Path("/tmp")


def _sweep(root: Path) -> None:
    """Removes the directories of makers that are gone: theirs is the lock nobody holds."""
    for left in root.glob(_PREFIX + "*"):
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # not ours, or gone since
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(left)
        except OSError:  # held by a living maker, or holds more than was made here
            continue
        finally:
            os.close(descriptor)


def _empty(left: Path) -> None:
    """Removes the sockets, locks and workers' logs in a directory, and then it; with anything else in it it stays."""
    for entry in left.iterdir():
        if entry.is_socket() or entry.suffix in (".lock", ".log"):
            entry.unlink()
    left.rmdir()
